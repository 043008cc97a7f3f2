"""Drives a runner with hand-made plans: staggered arrivals, chunked prompts, blocks in odd order.

Blocks are poisoned when they are freed, so a stale read shows as NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.request import RELEASED_BLOCK, Request
from loraplex_services.worker.types.runner_protocol import LaunchedStep
from loraplex_services.worker.types.step_plan import (
    PlannedRow,
    SampledRow,
    StateSpan,
    StepPlan,
    batch_order,
)
from tests.worker.loading import load_adapter, taken


@dataclass(slots=True)
class Job:
    """A request, the adapters it runs with, and when it arrives."""

    request: Request
    slots: tuple[tuple[int, float], ...] = ()
    arrival_step: int = 0
    samples: list[SampledRow] = field(default_factory=list)


Pairs = list[tuple[PlannedRow, Job]]


def greedy(name: str, prompt: Sequence[int], num_tokens: int, **changes: object) -> Request:
    """A request for `num_tokens` tokens, greedy unless changed."""
    params = {"max_tokens": num_tokens, "seed": 1, "ignore_eos": True, **changes}
    return Request(name, list(prompt), SamplingParams(**params))


class Driver:
    """Owns the blocks of a runner and steps jobs to their end."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self._rng = random.Random(0)
        self._free = list(range(runner.arena_blocks))
        self._rng.shuffle(self._free)
        runner.arena.data.fill_(0xFF)

    def load(self, slot: int, folder: Path) -> None:
        """Load an adapter into scattered blocks."""
        load_adapter(self.runner, slot, folder, partial(taken, self._free))

    def run(
        self, jobs: Sequence[Job], *, chunk: int = 1000, overlaps: bool = False
    ) -> list[list[int]]:
        """Run all jobs to `max_tokens` in one continuous batch; their outputs.

        Args:
            overlaps: launch each step before the one before it is collected, where a request's
                next step does not depend on what that one chooses.
        """
        step = 0
        in_flight: list[tuple[LaunchedStep, Pairs]] = []
        while in_flight or any(not _done(job) for job in jobs):
            active = [job for job in jobs if job.arrival_step <= step and not _has_all(job)]
            if any(self._has_outgrown(job.request) for job in active):
                self._collect(in_flight)
            if active:
                in_flight.append(self._launch(step, active, chunk))
            while len(in_flight) > (overlaps and bool(active)):
                self._collect(in_flight)
            step += 1
        return [job.request.output_ids for job in jobs]

    def _launch(self, step: int, jobs: Sequence[Job], chunk: int) -> tuple[LaunchedStep, Pairs]:
        pairs = [(self._plan(job, chunk), job) for job in jobs]
        pairs.sort(key=lambda pair: batch_order(pair[0]))
        states = tuple(self._spans(row) for row, _ in pairs) if self.runner.state_blocks else ()
        launched = self.runner.launch(StepPlan(step, tuple(row for row, _ in pairs), states))
        choosing = [row.request for row, _ in pairs if row.chooses]
        for output, request in enumerate(choosing):
            request.in_flight_output = output
            request.num_in_flight_tokens += 1
        for row, job in pairs:
            job.request.num_computed += row.num_tokens
        return launched, pairs

    def _collect(self, in_flight: list[tuple[LaunchedStep, Pairs]]) -> None:
        """Take in the oldest step, if there is one."""
        if not in_flight:
            return
        launched, pairs = in_flight.pop(0)
        for (row, job), result in zip(pairs, launched.result(), strict=True):
            job.samples.append(result)
            if result.token_id is not None and job.request.num_in_flight_tokens:
                job.request.take(result.token_id)
            self._release(job.request, row.start + row.num_tokens, finished=_done(job))

    def _plan(self, job: Job, chunk: int) -> PlannedRow:
        request = job.request
        self._switch_rope(request)
        num_tokens = min(chunk, request.num_pending)
        end = request.num_computed + num_tokens
        if not request.block_tables:
            request.block_tables = [[] for _ in self.runner.kv_group_windows]
        for table in request.block_tables:
            while len(table) * self.runner.tokens_per_block < end:
                table.append(self._free.pop(self._rng.randrange(len(self._free))))
        is_last = end == request.num_expected
        follows = request.in_flight_output if request.num_in_flight_tokens else None
        start = request.num_computed
        return PlannedRow(request, start, num_tokens, is_last, job.slots, follows)

    def _spans(self, row: PlannedRow) -> tuple[StateSpan, ...]:
        """The state of a row. Now and then it moves to other blocks in the middle, as it does where
        the prefix cache keeps it."""
        request = row.request
        source, before = list(request.state_blocks), request.state_blocks
        if not before or self._rng.random() < 0.2:
            request.state_blocks = [self._free.pop() for _ in range(self.runner.state_blocks)]
        target, cut = request.state_blocks, 0
        if target is not before and row.num_tokens > 1:
            cut = self._rng.randrange(1, row.num_tokens)
        spans = [StateSpan(cut, source, target)] if cut else []
        return (*spans, StateSpan(row.num_tokens - cut, target if cut else source, target))

    def _has_outgrown(self, request: Request) -> bool:
        base_switch_len = self.runner.model_info().rope_switch_len
        switch_len = request.rope.switch_len if request.rope else base_switch_len
        return switch_len is not None and request.num_expected > switch_len and not request.is_long

    def _switch_rope(self, request: Request) -> None:
        """As the scheduler does: a request that has grown long is computed anew."""
        if self._has_outgrown(request):
            self._free += [block for table in request.block_tables for block in table]
            request.block_tables, request.num_computed, request.is_long = [], 0, True

    def _release(self, request: Request, end: int, *, finished: bool) -> None:
        """Free blocks that nothing from position `end` on can see, or all of them."""
        if finished and request.state_blocks:
            self._poison(request.state_blocks)
            self._free += request.state_blocks
            request.state_blocks = []
        for table, window in zip(request.block_tables, self.runner.kv_group_windows, strict=True):
            first = len(table)
            if not finished:
                first = 0 if window is None else max(0, end - window + 1)
                first //= self.runner.tokens_per_block
            dead = [block for block in table[:first] if block != RELEASED_BLOCK]
            table[:first] = [RELEASED_BLOCK] * first
            self._poison(dead)
            self._free += dead

    def _poison(self, blocks: Sequence[int]) -> None:
        self.runner.arena.data[list(blocks)] = 0xFF


def _has_all(job: Job) -> bool:
    """True when nothing is left to compute, though a step may be under way."""
    return _done(job) if job.request.pooling else job.request.is_ending


def _done(job: Job) -> bool:
    if job.request.pooling:
        return job.request.num_computed == job.request.num_tokens
    return len(job.request.output_ids) >= job.request.sampling.max_tokens


def prompt_logprobs(driver: Driver) -> list[float]:
    """Of random prompts, with the adapter of slot 0."""
    rng = random.Random(3)
    prompts = [[rng.randrange(300) for _ in range(20)] for _ in range(4)]
    jobs = [
        Job(greedy(str(i), p, 4, prompt_logprobs=0), ((0, 1.0),)) for i, p in enumerate(prompts)
    ]
    driver.run(jobs)
    return [e.logprob for job in jobs for row in job.samples for e in row.prompt_logprobs.scored()]
