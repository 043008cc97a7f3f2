"""The cost model of a simulation: linear in the sizes of steps, copies and fetches; a JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from loraplex.errors import InvalidRequest
from loraplex_services.worker.types.extents import count_pages_per_block

NORMAL_P90 = 1.2816
"""Standard deviations."""
MANY_ROWS = 16
"""A tile of matrix units. Small steps cost next to nothing for each request, large ones do."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step, a copy, a fetch and a request's transport, and the bytes moved; and how
    outputs repeat. The defaults stand for what a step trace does not contain."""

    step_s: float = 1e-3
    """Time of every step."""
    idle_s: float = 0.0
    """Extra time of a step on a worker that was idle: waking up, cold caches."""
    row_s: float = 0.0
    """Time of every request in the step."""
    many_row_s: float = 0.0
    """More, of every request beyond `MANY_ROWS`."""
    prompt_s: float = 0.0
    """Time of every prompt, or part of one, in addition to that of its positions."""
    token_s: float = 1e-5
    """Time of every computed position."""
    kv_token_s: float = 0.0
    """Time of every cached position that is read."""
    adapter_byte_s: float = 0.0
    """Time of every byte of the distinct adapters that the step reads."""
    step_spread: float = 0.0
    """The standard deviation of the logarithm of the time of a step. The costs above give the
    mean."""
    load_s: float = 1e-3
    """Fixed time of every copy of an adapter to the device."""
    load_byte_s: float = 1e-10
    """Time of every copied byte."""
    fetch_s: float = 0.02
    """Time from the first request for an adapter until it is verified on disk; steps continue in
    the meantime."""
    fetch_byte_s: float = 1e-9
    """Time of every fetched byte."""
    request_s: float = 0.0
    """Time of a request outside the engine, in both directions: gateway, API servers, network.
    The median of log-normal times, one drawn for each request."""
    request_p90_s: float = 0.0
    """90th percentile of these times."""
    awake_share: float = 1.0
    """The factor of these times while other requests are in flight: the servers between
    client and engine are then awake, and their caches are warm."""
    adapter_bytes_per_rank: float = 2 << 20
    block_bytes: int = 2 << 20
    """Size of a block of the arena."""
    tokens_per_block: int = 16
    repeat_begin: float = 0.0
    """Probability that an output token begins a repetition, which drafts find; 0 = the worker makes
    no drafts."""
    repeat_end: float = 0.0
    """Probability that a token of a repetition ends it, so that its draft is refused."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise InvalidRequest.field(field.name, value, "must be a number of at least 0")
        if min(self.block_bytes, self.tokens_per_block, self.adapter_bytes_per_rank) < 1:
            raise InvalidRequest.field(
                "block_bytes", self.block_bytes, "and the other sizes must be at least 1"
            )
        if self.request_p90_s < self.request_s:
            raise InvalidRequest.field(
                "request_p90_s", self.request_p90_s, "must not be below the median, request_s"
            )

    def step(
        self,
        idle: bool,
        num_rows: int,
        num_prompts: int,
        num_tokens: int,
        kv_tokens: int,
        adapter_bytes: int,
    ) -> float:
        """Seconds of one step, in the mean."""
        return (
            self.step_s
            + self.idle_s * idle
            + self.row_s * num_rows
            + self.many_row_s * max(0, num_rows - MANY_ROWS)
            + self.prompt_s * num_prompts
            + self.token_s * num_tokens
            + self.kv_token_s * kv_tokens
            + self.adapter_byte_s * adapter_bytes
        )

    def spread(self, rng: random.Random) -> float:
        """The factor of the mean time of one step."""
        if not self.step_spread:
            return 1.0
        return rng.lognormvariate(-(self.step_spread**2) / 2.0, self.step_spread)

    def load(self, num_bytes: int) -> float:
        """Seconds of one copy to the device."""
        return self.load_s + self.load_byte_s * num_bytes

    def fetch(self, num_bytes: int) -> float:
        """Seconds until a requested adapter is on disk."""
        return self.fetch_s + self.fetch_byte_s * num_bytes

    def outside(self, rng: random.Random, is_alone: bool) -> float:
        """Seconds of one request outside the engine. `is_alone`: no other is in flight."""
        if not self.request_s:
            return 0.0
        spread = math.log(self.request_p90_s / self.request_s) / NORMAL_P90
        share = 1.0 if is_alone else self.awake_share
        return share * self.request_s * rng.lognormvariate(0.0, spread)

    @property
    def page_bytes(self) -> int:
        """The size of a page, a part of a block."""
        return self.block_bytes // count_pages_per_block(self.block_bytes)

    def adapter_pages(self, rank: int) -> int:
        """Pages that an adapter fills in the arena."""
        return max(1, math.ceil(rank * self.adapter_bytes_per_rank / self.page_bytes))

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read_costs(path: Path) -> Costs:
    """Read a cost file.

    Raises:
        InvalidRequest: naming the file, and the field that is missing, unknown or impossible.
    """
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidRequest.field("--costs", str(path), f"is not JSON: {error}") from None
    known = {field.name for field in dataclasses.fields(Costs)}
    given = set(fields) if isinstance(fields, dict) else set()
    if wrong := sorted(known ^ given):
        state = "is missing" if wrong[0] in known else "is not a cost"
        raise InvalidRequest.field("--costs", str(path), f"{wrong[0]} {state}")
    return Costs(**fields)
