"""Stands where the runner stands in a worker, and computes only how long it would take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loraplex.adapter_format.geometry import Geometry
from services.simulate.costs import Costs
from services.worker.request import SampledRow, StepPlan
from services.worker.runner_protocol import ModelInfo

CONTEXT = 1 << 20
VOCAB_SIZE = 1 << 30
"""Large enough for prompts that share no token."""


class VirtualClock:
    """A clock that only its owner moves. Seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, elapsed_s: float) -> None:
        """Let time pass."""
        assert elapsed_s >= 0, elapsed_s
        self.now_s += elapsed_s

    def advance_to(self, moment_s: float) -> None:
        """Let time pass until `moment_s`, if that is not past."""
        self.now_s = max(self.now_s, moment_s)


class TimedRunner:
    """The `Runner` of a simulated worker: every call moves the clock by its cost.

    An adapter's "folder" is its rank, as `rank/NAME`.
    """

    def __init__(self, costs: Costs, arena_bytes: int, clock: VirtualClock) -> None:
        self.arena_blocks = max(1, arena_bytes // costs.block_bytes)
        self.block_bytes = costs.block_bytes
        self.tokens_per_block = costs.tokens_per_block
        self.num_kv_groups = 1
        self.kv_group_windows: tuple[int | None, ...] = (None,)
        self._costs = costs
        self._clock = clock
        self._slot_bytes: dict[int, int] = {}

    def adapter_blocks(self, path: Path) -> int:
        """By the rank."""
        return self._costs.adapter_blocks(int(path.parent.name))

    def load_adapter(self, slot: int, path: Path, blocks: Sequence[int]) -> None:
        """Takes the time of the copy."""
        assert slot not in self._slot_bytes, f"slot {slot} is in use"
        num_bytes = len(blocks) * self.block_bytes
        self._slot_bytes[slot] = num_bytes
        self._clock.advance(self._costs.load(num_bytes))

    def unload_adapter(self, slot: int) -> None:
        """Takes no time."""
        del self._slot_bytes[slot]

    def execute(self, plan: StepPlan) -> list[SampledRow]:
        """Takes the time of the step; every token is 0."""
        slots = {slot for row in plan.rows for slot, _ in row.slots}
        step_s = self._costs.step(
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            kv_tokens=sum(row.start + row.num_tokens for row in plan.rows),
            adapter_bytes=sum(self._slot_bytes[slot] for slot in slots),
        )
        self._clock.advance(step_s)
        return [
            SampledRow(row.request.request_id, 0 if row.needs_logits else None) for row in plan.rows
        ]

    def model_info(self) -> ModelInfo:
        """A base without modules."""
        return ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=CONTEXT,
            eos_token_ids=(),
            dtype="float32",
            device="simulated",
            numerics_fingerprint="simulated",
            geometry=Geometry("simulated", "sha256:simulated", 1, VOCAB_SIZE, False, ()),
        )
