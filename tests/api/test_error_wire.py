"""Errors survive the way into messages and statuses and back."""

from __future__ import annotations

import inspect
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex import errors
from loraplex.api.error_wire import from_detail, from_rpc_error, to_detail, to_status
from loraplex.errors import AdapterNotFound, LoraplexError, Unavailable, Violation

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, LoraplexError) and cls is not AdapterNotFound
]
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
VIOLATIONS = st.lists(st.builds(Violation, TEXT, TEXT, TEXT), max_size=5)


class Failed(grpc.RpcError):
    """A failed call as the client stacks present it."""

    def __init__(self, status: grpc.Status) -> None:
        super().__init__()
        self._status: Any = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details or ""

    def trailing_metadata(self) -> object:
        return self._status.trailing_metadata


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@given(message=TEXT, violations=VIOLATIONS, retry_s=st.one_of(st.none(), st.just(1.5)))
def test_both_ways_round(
    cls: type[LoraplexError], message: str, violations: list[Violation], retry_s: float | None
) -> None:
    sent = cls(message, violations=violations, retry_after_s=retry_s)
    for got in (from_detail(to_detail(sent)), from_rpc_error(Failed(to_status(sent)))):
        assert type(got) is cls
        assert (got.message, got.reason) == (sent.message, sent.reason)
        assert got.violations == sent.violations
        assert got.retry_after_s == retry_s


def test_adapter_not_found_keeps_its_class() -> None:
    got = from_rpc_error(Failed(to_status(AdapterNotFound("default/x:v1", "try list"))))
    assert type(got) is AdapterNotFound
    assert "default/x:v1" in got.message


def test_status_of_the_transport_keeps_code_and_text() -> None:
    plain = Failed(to_status(Unavailable("refused")))
    plain._status = plain._status._replace(trailing_metadata=())
    got = from_rpc_error(plain)
    assert type(got) is Unavailable
    assert got.message == "refused"


def test_garbage_in_the_details_is_ignored() -> None:
    broken = Failed(to_status(Unavailable("refused")))
    broken._status = broken._status._replace(
        trailing_metadata=(("grpc-status-details-bin", b"\xff\xff\xff"),)
    )
    assert type(from_rpc_error(broken)) is Unavailable


def test_a_refusal_whose_status_the_client_library_lost_may_be_retried() -> None:
    lost = Failed(to_status(LoraplexError("Internal error from Core")))
    lost._status = lost._status._replace(trailing_metadata=())
    got = from_rpc_error(lost)
    assert (type(got), got.reason) == (Unavailable, "STATUS_LOST")
