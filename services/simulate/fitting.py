"""Fits simulated costs to a real worker's step trace (`LORAPLEX_DEBUG=step-trace=FILE`)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.errors import InvalidRequest
from loraplex_services.simulate.costs import MANY_ROWS, Costs
from loraplex_services.simulate.least_squares import fit
from loraplex_services.worker.scheduling.drafts import FIXED_ROWS, NUM_MATCHED

MIN_STEPS = 20
"""A fit to fewer steps is meaningless."""

STEP_FIELDS = ("idle", "rows", "prompts", "tokens", "kv_tokens", "adapter_bytes")
STEP_COSTS = ("idle_s", "row_s", "prompt_s", "token_s", "kv_token_s", "adapter_byte_s")
"""The cost of each of these fields."""
DRAFT_FIELDS = ("drafted_rows", "new_drafted_rows", "accepted", "refused_rows")
LEAD_TOKENS = NUM_MATCHED
"""Tokens of a repetition that are generated before the scheduler finds drafts."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Costs, and how well they explain the trace."""

    costs: Costs
    num_steps: int
    explained: float
    """Coefficient of determination over the steps: 1 = exactly."""
    measured_s: float
    """All steps together."""
    modelled_s: float


def fit_trace(path: Path) -> Fitted:
    """Fit a step trace.

    Raises:
        InvalidRequest: the file is missing, is no step trace, or is too short.
    """
    lines = list(_lines(path))
    arenas = [line for line in lines if "arena_blocks" in line]
    steps = [line for line in lines if "step_s" in line]
    loads = [line for line in lines if "load_s" in line]
    if not arenas or len(steps) < MIN_STEPS:
        raise InvalidRequest.field(
            "--fit",
            path,
            f"holds {len(arenas)} workers and {len(steps)} steps; one worker and {MIN_STEPS} steps "
            "are needed: run one with LORAPLEX_DEBUG=step-trace=FILE, and give it work",
        )
    if lacking := [
        name for name in (*STEP_FIELDS, *DRAFT_FIELDS) if any(name not in step for step in steps)
    ]:
        raise InvalidRequest.field(
            "--fit",
            path,
            f"its steps lack {lacking[0]!r}, because another version wrote it; record it again",
        )
    arena = arenas[-1]
    costs = Costs(block_bytes=arena["block_bytes"], tokens_per_block=arena["tokens_per_block"])
    costs = _with_steps(costs, steps)
    if any(load["rank"] for load in loads):
        costs = _with_loads(costs, loads)
    return _judged(_with_drafts(costs, steps), steps)


def _with_drafts(costs: Costs, steps: list[dict[str, Any]]) -> Costs:
    """Repetitions as long and as far apart as those in which drafts were accepted. How far apart
    they are is seen in small steps, in which a request has drafts as soon as there are some."""
    small = [step for step in steps if step["rows"] < FIXED_ROWS] or steps
    num_new = sum(step["new_drafted_rows"] for step in small)
    accepted, refused = (sum(step[name] for step in steps) for name in ("accepted", "refused_rows"))
    if not num_new:
        return costs
    undrafted = sum(step["rows"] - step["prompts"] - step["drafted_rows"] for step in small)
    return dataclasses.replace(
        costs,
        repeat_begin=num_new / max(num_new, undrafted - LEAD_TOKENS * num_new),
        repeat_end=refused / (accepted + refused),
    )


def _with_steps(costs: Costs, steps: list[dict[str, Any]]) -> Costs:
    rows = [
        [1.0, *(float(step[name]) for name in STEP_FIELDS), max(0.0, step["rows"] - MANY_ROWS)]
        for step in steps
    ]
    found = fit(rows, [step["step_s"] for step in steps])
    names = ("step_s", *STEP_COSTS, "many_row_s")
    changes: dict[str, Any] = dict(zip(names, found, strict=True))
    costs = dataclasses.replace(costs, **changes)
    return dataclasses.replace(costs, step_spread=_spread(costs, steps))


def _spread(costs: Costs, steps: list[dict[str, Any]]) -> float:
    """Spread of steps around their costs; each is weighted by its time."""
    means_s = [costs.step(*(step[name] for name in STEP_FIELDS)) for step in steps]
    squares = [
        mean_s * math.log(step["step_s"] / mean_s) ** 2
        for step, mean_s in zip(steps, means_s, strict=True)
        if mean_s and step["step_s"]
    ]
    return math.sqrt(math.fsum(squares) / math.fsum(means_s)) if squares else 0.0


def _with_loads(costs: Costs, loads: list[dict[str, Any]]) -> Costs:
    load_s, byte_s = fit([[1.0, load["bytes"]] for load in loads], [x["load_s"] for x in loads])
    ranks = math.fsum(load["rank"] for load in loads)
    return dataclasses.replace(
        costs,
        load_s=load_s,
        load_byte_s=byte_s,
        adapter_bytes_per_rank=math.fsum(load["bytes"] for load in loads) / ranks,
    )


def _judged(costs: Costs, steps: list[dict[str, Any]]) -> Fitted:
    measured = [step["step_s"] for step in steps]
    modelled = [costs.step(*(step[name] for name in STEP_FIELDS)) for step in steps]
    mean = math.fsum(measured) / len(measured)
    spread = math.fsum((value - mean) ** 2 for value in measured)
    error = math.fsum((a - b) ** 2 for a, b in zip(measured, modelled, strict=True))
    return Fitted(
        costs=costs,
        num_steps=len(steps),
        explained=1.0 - error / spread if spread else 1.0,
        measured_s=math.fsum(measured),
        modelled_s=math.fsum(modelled),
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of the file; a last line cut short by a kill is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise InvalidRequest.field("--fit", str(path), "no such file") from None
    complete, _, _ = text.rpartition("\n")
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError:
            raise InvalidRequest.field("--fit", str(path), f"line {number} is not JSON") from None
