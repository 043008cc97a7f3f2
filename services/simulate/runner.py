"""Replaces a worker's runner and computes only the duration of a step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapter_format.geometry import Geometry
from loraplex_services.simulate.costs import Costs
from loraplex_services.simulate.text import SimulatedText
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.extents import Extents
from loraplex_services.worker.types.own_rope import BaseRopes
from loraplex_services.worker.types.runner_protocol import Copied, ModelInfo
from loraplex_services.worker.types.sites import SiteTable
from loraplex_services.worker.types.step_plan import PlannedRow, Sampled, SampledRow, StepPlan

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCopy(Copied):
    """A copy of a plain LoRA that ends at a time of the virtual clock; its result is itself."""

    end_s: float
    clock: VirtualClock

    def done(self) -> bool:
        """True from `end_s` on."""
        return self.clock.now_s >= self.end_s

    def result(self) -> SimulatedCopy:
        """The copy itself."""
        return self

    def add_done_callback(self, callback: Callable[[SimulatedCopy], object], /) -> None:
        """Does nothing: nobody sleeps who would have to be woken."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that ends at a time of the virtual clock."""

    rows: list[SampledRow]
    end_s: float
    clock: VirtualClock

    def choose_tokens(self) -> None:
        """Does nothing: the tokens are chosen."""

    def result(self) -> list[SampledRow]:
        """Lets time pass until the step ends."""
        self.clock.advance_to(self.end_s)
        return self.rows


class TimedRunner:
    """The `Runner` of a simulated worker: steps take the time that they cost, one after another;
    copies run at the same time."""

    stall_s = 0.0
    state_blocks = 0

    def __init__(
        self,
        costs: Costs,
        arena_bytes: int,
        clock: VirtualClock,
        seed: int = 0,
        *,
        overlaps: bool = False,
    ) -> None:
        """`overlaps`: a step is launched while the one before runs, and begins when that ends."""
        self.overlaps = overlaps
        self.arena_blocks = max(1, arena_bytes // costs.block_bytes)
        self.block_bytes = costs.block_bytes
        self._page_bytes = costs.page_bytes
        self.tokens_per_block = costs.tokens_per_block
        self.kv_group_windows: tuple[int | None, ...] = (None,)
        self._costs = costs
        self._clock = clock
        self._slot_bytes: dict[int, int] = {}
        self._copies: list[SimulatedCopy] = []
        self._copies_end_s = 0.0
        self._step_end_s = 0.0
        self._rng = random.Random(seed)
        self._text = SimulatedText(costs, seed)

    @property
    def layout(self) -> AdapterLayout:
        """Nothing is packed here."""
        nothing = SiteTable((), {}), BaseRopes((), (), 0)
        return AdapterLayout(self.block_bytes, "F32", False, 0, "simulated", *nothing)

    @property
    def next_copy_s(self) -> float:
        """When the next copy ends; infinite when there is none."""
        self._copies = [copy for copy in self._copies if not copy.done()]
        return min((copy.end_s for copy in self._copies), default=math.inf)

    def pack_adapter(self, path: Path) -> Any:
        """Not used, because simulated adapters are already packed."""
        raise AssertionError(path)

    def copy_adapter(self, path: Path, extents: Extents, step_s: float = 0.0) -> SimulatedCopy:
        """One copy after another, concurrently with steps."""
        num_bytes = extents.num_pages * self._page_bytes
        elapsed_s = self._costs.load(num_bytes)
        self._copies_end_s = max(self._copies_end_s, self._clock.now_s) + elapsed_s
        facts, times = AdapterFacts(), (elapsed_s, elapsed_s)  # passed on when it is complete
        end_s = self._copies_end_s
        copy = SimulatedCopy(path, num_bytes, facts, *times, end_s=end_s, clock=self._clock)
        self._copies.append(copy)
        return copy

    def await_copies(self, timeout_s: float) -> None:
        """Wait for the copies on the virtual clock, at most `timeout_s`."""
        end_s = min(self._copies_end_s, self._clock.now_s + timeout_s)
        self._clock.advance_to(end_s)

    def enter_adapter(self, slot: int, copied: Copied) -> None:
        """Takes no time."""
        assert slot not in self._slot_bytes, f"slot {slot} is in use"
        self._slot_bytes[slot] = copied.num_bytes

    def unload_adapter(self, slot: int) -> None:
        """Takes no time."""
        del self._slot_bytes[slot]

    def launch(self, plan: StepPlan) -> SimulatedStep:
        """Begins when the step before has ended."""
        begin_s = max(self._clock.now_s, self._step_end_s)
        slots = {slot for row in plan.rows for slot, _ in row.slots}
        step_s = self._costs.step(
            idle=begin_s > self._step_end_s,
            num_rows=len(plan.rows),
            num_prompts=sum(row.is_context and not row.drafts for row in plan.rows),
            num_tokens=plan.num_tokens,
            kv_tokens=sum(row.start + row.num_tokens for row in plan.rows),
            adapter_bytes=sum(self._slot_bytes[slot] for slot in slots),
        )
        self._step_end_s = begin_s + step_s * self._costs.spread(self._rng)
        rows = [self._sampled(row) for row in plan.rows]
        return SimulatedStep(rows, self._step_end_s, self._clock)

    def _sampled(self, row: PlannedRow) -> SampledRow:
        if not row.needs_logits:
            return SampledRow()
        tokens = [self._text.next_token(row.request)]
        for draft in row.drafts:
            if tokens[-1] != draft:
                break
            tokens.append(self._text.next_token(row.request))
        first, *further = tokens
        return SampledRow(first, further=tuple(Sampled(t, None) for t in further))

    def model_info(self) -> ModelInfo:
        """A base without modules."""
        return ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=CONTEXT,
            eos_token_ids=(),
            dtype="float32",
            device="simulated",
            kernels="simulated",
            verifies_drafts=self._costs.repeat_begin > 0.0,
            numerics_fingerprint="simulated",
            geometry=Geometry("simulated", "sha256:simulated", 1, VOCAB_SIZE, False, ()),
        )
