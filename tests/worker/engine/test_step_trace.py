"""The step trace: what it writes of steps and copies, and that it changes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from loraplex.api.request import AdapterSet
from loraplex.api.sampling import SamplingParams
from loraplex_services.simulate.runner import TimedRunner, VirtualClock
from loraplex_services.simulate.text import SimulatedText
from loraplex_services.worker.engine.step_trace import TracedRunner
from loraplex_services.worker.types.extents import Extents
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.simulate.fleets import COSTS

PAGES_PER_BLOCK = COSTS.block_bytes // COSTS.page_bytes


@dataclass
class Traced:
    """A traced runner whose copies take no longer than it is waited for."""

    runner: TracedRunner
    clock: VirtualClock

    def load(self, slot: int, folder: Path, extents: Extents) -> None:
        pending = self.runner.copy_adapter(folder, extents)
        while not pending.done():
            self.clock.advance(1.0)
        self.runner.enter_adapter(slot, pending.result())


def traced(tmp_path: Path) -> tuple[Traced, Path]:
    path, clock = tmp_path / "steps.jsonl", VirtualClock()
    return Traced(TracedRunner(TimedRunner(COSTS, 1 << 20, clock), path), clock), path


def row(
    request_id: str, *, start: int = 0, num_tokens: int = 5, slot: int | None = None
) -> PlannedRow:
    request = Request(request_id, list(range(10)), SamplingParams(max_tokens=4, seed=0))
    slots = () if slot is None else ((slot, 1.0),)
    return PlannedRow(request, start, num_tokens, needs_logits=False, slots=slots)


def decoding(planned: PlannedRow, drafts: tuple[int, ...] = ()) -> PlannedRow:
    num_tokens = 1 + len(drafts)
    return planned._replace(needs_logits=True, num_tokens=num_tokens, drafts=drafts)


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_line_with_its_sizes_and_counts_each_adapter_once(tmp_path: Path) -> None:
    stage, path = traced(tmp_path)
    folder = tmp_path / "8"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    stage.load(3, folder, Extents(2 * PAGES_PER_BLOCK, (4, 8)))
    rows = (row("a", slot=3), row("b", start=4, num_tokens=2, slot=3), row("c"))
    results = stage.runner.launch(StepPlan(0, rows)).result()
    assert len(results) == 3
    arena, load, step = lines(path)
    assert arena["block_bytes"] == COSTS.block_bytes
    assert (load["bytes"], load["rank"]) == (2 * COSTS.block_bytes, 8)
    assert (step["rows"], step["prompts"], step["tokens"], step["kv_tokens"]) == (3, 3, 12, 16)
    assert step["adapter_bytes"] == 2 * COSTS.block_bytes


def test_the_first_step_counts_from_when_its_request_could_begin(tmp_path: Path) -> None:
    path, clock = tmp_path / "steps.jsonl", VirtualClock()
    runner = TracedRunner(TimedRunner(COSTS, 1 << 20, clock), path, clock)
    first = row("a")
    first.request.adapters_ready_s = 1.0
    clock.advance_to(1.25)
    runner.launch(StepPlan(0, (first,))).result()
    runner.launch(StepPlan(1, (first,))).result()
    step_s = COSTS.step(False, 1, 1, 5, 5, 0)
    steps = lines(path)[1:]
    assert [line["step_s"] for line in steps] == pytest.approx([0.25 + step_s, step_s])
    assert [line["idle"] for line in steps] == [True, False]


def test_an_unloaded_slot_may_be_used_again(tmp_path: Path) -> None:
    stage, path = traced(tmp_path)
    folder = tmp_path / "8"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    for num_blocks, positions in ((2, (4, 8)), (1, (20,))):
        stage.load(0, folder, Extents(num_blocks * PAGES_PER_BLOCK, positions))
        stage.runner.launch(StepPlan(0, (row("a", slot=0),))).result()
        stage.runner.unload_adapter(0)
    steps = [line["adapter_bytes"] for line in lines(path) if "step_s" in line]
    assert steps == [2 * COSTS.block_bytes, COSTS.block_bytes]


def test_drafts_are_counted_as_new_where_the_step_before_had_none(tmp_path: Path) -> None:
    path, clock = tmp_path / "steps.jsonl", VirtualClock()
    costs = replace(COSTS, repeat_begin=1.0)  # all outputs are the tokens of one phrase
    runner = TracedRunner(TimedRunner(costs, 1 << 20, clock), path, clock)
    first, second = (row(name, start=9, num_tokens=1) for name in "ab")
    text = SimulatedText(costs, seed=0)
    phrase = [text.next_token(first.request) for _ in range(6)]
    runner.launch(StepPlan(0, (decoding(first),))).result()
    right = decoding(first, drafts=(phrase[1], phrase[2]))
    runner.launch(StepPlan(1, (right,))).result()
    wrong = decoding(first, drafts=(phrase[4], -1, phrase[5]))
    runner.launch(StepPlan(2, (wrong, decoding(second)))).result()
    names = ("prompts", "drafted_rows", "new_drafted_rows", "accepted", "refused_rows")
    found = [tuple(line[name] for name in names) for line in lines(path)[1:]]
    assert found == [(1, 0, 0, 0, 0), (0, 1, 1, 2, 0), (1, 1, 0, 1, 1)]


def test_nothing_of_the_prompt_or_the_adapters_name_is_written(tmp_path: Path) -> None:
    stage, path = traced(tmp_path)
    secret = row("secret-id")
    secret.request.prompt_ids[:] = [987654] * 10
    secret.request.adapters = AdapterSet((("sha256:secret", 1.0),))
    stage.runner.launch(StepPlan(0, (secret,))).result()
    text = path.read_text()
    assert "secret" not in text and "987654" not in text
