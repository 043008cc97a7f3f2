"""Encodes the steps that rank 0 executes as small messages for the other ranks.

Block tables travel as differences, so that a message does not grow with the contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.runner.parallel.messages import RowMessage, Step
from loraplex_services.worker.runner.step_inputs import Int64s, StepInputs
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StateSpan, StepPlan

MAX_ABSENT = 1024
"""Number of requests that are remembered although the step does not compute them."""
NO_SAMPLING = SamplingParams(max_tokens=0, seed=0)


@dataclass(slots=True)
class SentRequest:
    """The block tables of a request that the other ranks know; made by rank 0's `StepWriter`."""

    key: int
    tables: list[list[int]]
    """The request's own tables. A different list means that the request has started again."""
    sent: list[list[int]] = field(default_factory=list)
    """A copy of the tables as they were sent."""


class StepWriter:
    """Rank 0's end: encodes steps in the order in which they are launched."""

    def __init__(self) -> None:
        self._known: dict[Request, SentRequest] = {}
        self._num_keys = 0

    def write(self, step: StepInputs) -> Step:
        """The message of a step."""
        plan = step.plan
        states = plan.states or ((),) * len(plan.rows)
        rows = [self._row(*row) for row in zip(plan.rows, states, strict=True)]
        rope_rows = None if step.rope_rows is None else step.rope_rows.tobytes()
        return Step(
            rows=rows,
            gone=self._forget(plan.rows),
            runs=[(run.slot, run.coef, run.begin, run.end) for run in step.runs],
            token_ids=step.token_ids.tobytes(),
            rope_rows=rope_rows,
            follows=step.follows.tobytes(),
            read_rows=None if step.read_rows is None else step.read_rows.tobytes(),
        )

    def _row(self, row: PlannedRow, states: Sequence[StateSpan]) -> RowMessage:
        request = row.request
        tables, num_prompt = request.block_tables, 0
        known = self._known.get(request)
        if known is None or known.tables is not tables:
            key = known.key if known else self._num_keys
            self._num_keys += known is None
            known = SentRequest(key, tables, [[] for _ in tables])
            self._known[request] = known
            num_prompt = len(request.prompt_ids)
        changes = []
        for table, sent in zip(tables, known.sent, strict=True):
            begin = _num_equal(table, sent)
            sent[begin:] = table[begin:]
            changes.append((begin, table[begin:]))
        spans = [_span_message(span) for span in states]
        return RowMessage(known.key, num_prompt, row.start, row.num_tokens, changes, spans)

    def _forget(self, rows: Sequence[PlannedRow]) -> list[int]:
        """Keys of requests that have left, once there are many."""
        if len(self._known) <= len(rows) + MAX_ABSENT:
            return []
        present = {row.request for row in rows}
        absent = [request for request in self._known if request not in present]
        return [self._known.pop(request).key for request in absent]


class StepReader:
    """Another rank's end. Its requests have no tokens but those of the step."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def read(self, message: Step) -> StepInputs:
        """The inputs of a step, equal to those of rank 0."""
        rows = tuple(self._row(row) for row in message.rows)
        for key in message.gone:
            del self._requests[key]
        states = tuple(tuple(map(_span, row.states)) for row in message.rows)
        return StepInputs(
            StepPlan(0, rows, states if any(states) else ()),
            tuple(RowRun(*run) for run in message.runs),
            _int64s(message.token_ids),
            np.array([row.start for row in rows], dtype=np.int64),
            np.array([row.num_tokens for row in rows], dtype=np.int64),
            None if message.rope_rows is None else _int64s(message.rope_rows),
            _int64s(message.follows).reshape(2, -1),
            None if message.read_rows is None else _int64s(message.read_rows),
        )

    def _row(self, row: RowMessage) -> PlannedRow:
        if row.num_prompt:
            tables: list[list[int]] = [[] for _ in row.tables]
            self._requests[row.key] = Request(
                str(row.key), [0] * row.num_prompt, NO_SAMPLING, block_tables=tables
            )
        request = self._requests[row.key]
        for table, (begin, blocks) in zip(request.block_tables, row.tables, strict=True):
            table[begin:] = blocks
        return PlannedRow(request, row.start, row.num_tokens, False, ())


def _span_message(span: StateSpan) -> tuple[int, list[int] | None, list[int]]:
    source = None if span.source is span.target else list(span.source)
    return span.num_tokens, source, list(span.target)


def _span(message: tuple[int, list[int] | None, list[int]]) -> StateSpan:
    num_tokens, source, target = message
    return StateSpan(num_tokens, target if source is None else source, target)


def _num_equal(table: list[int], sent: list[int]) -> int:
    """Number of leading entries of a table that are unchanged since they were sent."""
    if table[: len(sent)] == sent:
        return len(sent)
    pairs = zip(table, sent, strict=False)
    return next((i for i, (now, then) in enumerate(pairs) if now != then), len(table))


def _int64s(data: bytes) -> Int64s:
    return np.frombuffer(data, dtype=np.int64).copy()
