"""A runner that records the contents and the duration of each step and each copy.

One JSON object per line. A first line describes the arena; `{"step_s": ...}` lines are steps,
`{"load_s": ...}` lines copies of adapters. No prompt, token or name is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from loraplex.adapter_format import CONFIG_FILE
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.runner_protocol import (
    Copied,
    LaunchedStep,
    Runner,
)
from loraplex_services.worker.types.step_plan import SampledRow, StepPlan


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Writes a line when the result of the step is read."""

    runner: TracedRunner
    plan: StepPlan
    begin_s: float
    adapter_bytes: int
    launched: LaunchedStep

    def choose_tokens(self) -> None:
        """See `LaunchedStep`."""
        self.launched.choose_tokens()

    def result(self) -> list[SampledRow]:
        """See `LaunchedStep`."""
        rows = self.launched.result()
        self.runner.ended(self.plan, rows, self.begin_s, self.adapter_bytes)
        return rows


class TracedRunner:
    """A runner that forwards its calls to another one, and appends a line to a file for each step
    and each copy."""

    def __init__(
        self, runner: Runner, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises OSError when `path` cannot be written."""
        self._clock = clock
        self.arena_blocks = runner.arena_blocks
        self.block_bytes = runner.block_bytes
        self.tokens_per_block = runner.tokens_per_block
        self.kv_group_windows = runner.kv_group_windows
        self.state_blocks = runner.state_blocks
        self.layout, self.overlaps = runner.layout, runner.overlaps
        self.model_info, self.pack_adapter = runner.model_info, runner.pack_adapter
        self.copy_adapter, self.await_copies = runner.copy_adapter, runner.await_copies
        self._runner = runner
        self._file = path.open("a", buffering=1)
        self._slot_bytes: dict[int, int] = {}
        self._last_ids: set[str] = set()
        self._drafting: WeakSet[Request] = WeakSet()
        """Requests that had drafts in their last step."""
        self._last_end_s = 0.0
        self._write(
            arena_blocks=self.arena_blocks,
            block_bytes=self.block_bytes,
            tokens_per_block=self.tokens_per_block,
        )

    def enter_adapter(self, slot: int, copied: Copied) -> None:
        """See `Runner`."""
        self._runner.enter_adapter(slot, copied)
        self._slot_bytes[slot] = num_bytes = copied.num_bytes
        rank = json.loads((copied.path / CONFIG_FILE).read_bytes()).get("r", 0)
        self._write(load_s=copied.elapsed_s, bytes=num_bytes, rank=rank)

    def unload_adapter(self, slot: int) -> None:
        """See `Runner`."""
        self._slot_bytes.pop(slot, None)
        self._runner.unload_adapter(slot)

    def launch(self, plan: StepPlan) -> TracedStep:
        """See `Runner`."""
        begin_s = self._clock()
        slots = {slot for row in plan.rows for slot, _ in row.slots}
        num_bytes = sum(self._slot_bytes[slot] for slot in slots)
        return TracedStep(self, plan, begin_s, num_bytes, self._runner.launch(plan))

    def ended(
        self, plan: StepPlan, sampled: list[SampledRow], begin_s: float, adapter_bytes: int
    ) -> None:
        """Write down a step that has just ended.

        A step that continues requests of the previous one is timed from the end of that step, so
        that its time includes planning and passing tokens on. Any other step is timed from the
        moment when its first request could have begun, but not from before the end of the previous
        step. Its time then also includes waking up and accepting requests.
        """
        ids = {row.request.request_id for row in plan.rows}
        is_next = not ids.isdisjoint(self._last_ids)
        ready_s = min(_ready_s(row.request, begin_s) for row in plan.rows)
        is_idle = not is_next and ready_s > self._last_end_s
        begin_s = ready_s if is_idle else self._last_end_s
        self._last_end_s, self._last_ids = self._clock(), ids
        self._write(
            step_s=self._last_end_s - begin_s,
            idle=is_idle,
            rows=len(plan.rows),
            prompts=sum(row.is_context and not row.drafts for row in plan.rows),
            tokens=plan.num_tokens,
            kv_tokens=sum(row.start + row.num_tokens for row in plan.rows),
            adapter_bytes=adapter_bytes,
            **self._drafts(plan, sampled),
        )

    def _drafts(self, plan: StepPlan, sampled: list[SampledRow]) -> dict[str, int]:
        """The numbers of rows with drafts, of those among them whose request had none in its
        previous step, of accepted drafts, and of rows in which a draft was refused."""
        drafted = [
            (row, len(result.further))
            for row, result in zip(plan.rows, sampled, strict=True)
            if row.drafts
        ]
        num_new = sum(row.request not in self._drafting for row, _ in drafted)
        self._drafting.difference_update(row.request for row in plan.rows)
        self._drafting.update(row.request for row, _ in drafted)
        return {
            "drafted_rows": len(drafted),
            "new_drafted_rows": num_new,
            "accepted": sum(num_accepted for _, num_accepted in drafted),
            "refused_rows": sum(num_accepted < len(row.drafts) for row, num_accepted in drafted),
        }

    @property
    def stall_s(self) -> float:
        """See `Runner`."""
        return self._runner.stall_s

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")


def _ready_s(request: Request, launched_s: float) -> float:
    """When everything that the step needs was available. The compilation of a grammar does not
    count as part of a step."""
    follows_grammar = request.constraint is not None
    ready_s = request.first_scheduled_s if follows_grammar else request.adapters_ready_s
    return launched_s if ready_s is None else ready_s
