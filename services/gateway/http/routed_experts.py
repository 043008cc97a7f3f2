"""The experts of each token over HTTP: the fields that request them, and their forms in answers.

`npy` is the form of vLLM, `raw` that of the servers of prime-rl and SkyRL.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TypedDict

from loraplex.api.output import RoutedExperts
from loraplex.errors import Unsupported
from loraplex_services.gateway.http.body import Body, bad_type

FIELD = "return_routed_experts"
FORMS = ("npy", "raw")
_ALIGNMENT = 64
"""Bytes of which NumPy makes the header of a file a multiple."""


@dataclass(frozen=True, slots=True)
class ExpertsRequest:
    """The fields of a body that request experts."""

    start: int | None = None
    """First position of the prompt whose experts are returned; None = they are not."""
    form: str = FORMS[0]
    name: str = FIELD
    """The field with its prefix, for errors."""

    def check_stream(self, stream: bool) -> None:
        """Raises: Unsupported for a stream that would have to contain experts."""
        if stream and self.start is not None:
            why = "are not available in streams; leave out stream, or use gRPC"
            raise Unsupported.field(self.name, "true", why)


class RawExperts(TypedDict):
    """The raw form of routed experts. `data` comes first, because clients look for it there."""

    data: str
    shape: list[int]
    dtype: str
    start: int


class RoutedField(TypedDict, total=False):
    routed_experts: str | RawExperts | None


def read_experts_request(body: Body) -> ExpertsRequest:
    """The experts that a body requests. A start without the request changes nothing, because
    clients send it in every turn of a conversation. Raises: InvalidRequest."""
    name = body.prefix + FIELD
    form = body.raw(FIELD, {"type": ["boolean", "string"], "enum": [True, False, *FORMS]})
    start = body.integer("routed_experts_prompt_start") or 0
    if form is None or form is False:
        return ExpertsRequest()
    if form is not True and form not in FORMS:
        raise bad_type(name, form, "true, false, " + " or ".join(map(repr, FORMS)))
    return ExpertsRequest(start, FORMS[0] if form is True else form, name)


def routed_field(request: ExpertsRequest, routed: RoutedExperts | None) -> RoutedField:
    """The field of a choice; null if nothing was computed."""
    if request.start is None:
        return {}
    if routed is None:
        return {"routed_experts": None}
    if request.form == "npy":
        return {"routed_experts": _base64(npy_header(routed) + routed.experts)}
    raw: RawExperts = {
        "data": _base64(routed.experts),
        "shape": list(routed.shape),
        "dtype": routed.dtype,
        "start": routed.start,
    }
    return {"routed_experts": raw}


def npy_header(routed: RoutedExperts) -> bytes:
    """The beginning of a file that `numpy.load` reads, version 1.0 of the format."""
    descr = {1: "|u1", 2: "<u2"}[routed.routing.expert_bytes]
    fields = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {routed.shape!r}, }}"
    begin = b"\x93NUMPY\x01\x00"
    num_padding = -(len(begin) + 2 + len(fields) + 1) % _ALIGNMENT
    text = fields.encode() + b" " * num_padding + b"\n"
    return begin + len(text).to_bytes(2, "little") + text


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
