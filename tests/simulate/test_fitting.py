"""From a step trace to costs, and the files of both."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.sampling import SamplingParams
from loraplex.errors import InvalidRequest
from loraplex_services.simulate.costs import read_costs
from loraplex_services.simulate.fitting import fit_trace
from loraplex_services.simulate.runner import TimedRunner, VirtualClock
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.engine.step_trace import TracedRunner
from tests.simulate.fleets import COSTS, engine_config
from tests.worker.commands import make_submit

NO_DRAFTS = {"drafted_rows": 0, "new_drafted_rows": 0, "accepted": 0, "refused_rows": 0}
ARENA = {"arena_blocks": 100, "block_bytes": 4096, "tokens_per_block": 16}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def steps(count: int) -> list[dict[str, Any]]:
    """2 ms a step, 3 more after idling, 0.5 ms a prompt, 0.1 ms a token, 1 ns an adapter byte,
    0.2 ms a request beyond sixteen."""
    rng = random.Random(0)
    lines = []
    for _ in range(count):
        rows, prompts = rng.randint(1, 32), rng.randint(0, 3)
        tokens = rows + prompts * rng.randint(0, 100)
        kv_tokens, adapter_bytes = tokens * rng.randint(1, 9), rng.randint(0, 4) * 1_000_000
        idle = rng.random() < 0.2
        step_s = 0.002 + idle * 0.003 + prompts * 5e-4 + tokens * 1e-4 + adapter_bytes * 1e-9
        step_s += max(0, rows - 16) * 2e-4
        sizes = {"rows": rows, "prompts": prompts, "tokens": tokens, "kv_tokens": kv_tokens}
        sizes |= {"adapter_bytes": adapter_bytes, **NO_DRAFTS}
        lines.append({"step_s": step_s, "idle": idle, **sizes})
    return lines


def test_the_costs_behind_a_trace_are_found(tmp_path: Path) -> None:
    loads = [{"load_s": 0.001 + n * 1e-9, "bytes": n, "rank": n // 1000} for n in (8000, 64000)]
    fitted = fit_trace(write(tmp_path / "steps", [ARENA, *steps(50), *loads]))
    costs = fitted.costs
    assert (costs.step_s, costs.token_s) == pytest.approx((0.002, 1e-4), rel=1e-4)
    assert costs.idle_s == pytest.approx(0.003, rel=1e-4)
    assert costs.step_spread == pytest.approx(0.0, abs=1e-6)
    assert costs.many_row_s == pytest.approx(2e-4, rel=1e-4)
    assert costs.prompt_s == pytest.approx(5e-4, rel=1e-4)
    assert costs.adapter_byte_s == pytest.approx(1e-9, rel=1e-4)
    assert costs.kv_token_s == pytest.approx(0.0, abs=1e-9)
    assert (costs.load_s, costs.load_byte_s) == pytest.approx((0.001, 1e-9), rel=1e-4)
    assert (costs.repeat_begin, costs.repeat_end) == (0.0, 0.0)
    assert (costs.block_bytes, costs.adapter_bytes_per_rank) == (4096, pytest.approx(1000))
    assert fitted.explained == pytest.approx(1.0)
    assert fitted.modelled_s == pytest.approx(fitted.measured_s)


def test_how_far_steps_spread_is_found_and_drawn_again(tmp_path: Path) -> None:
    rng, costs = random.Random(0), replace(COSTS, step_spread=0.3)
    lines = [{**step, "step_s": step["step_s"] * costs.spread(rng)} for step in steps(2000)]
    fitted = fit_trace(write(tmp_path / "steps", [ARENA, *lines]))
    assert fitted.costs.step_spread == pytest.approx(0.3, rel=0.1)
    assert fitted.costs.step_s == pytest.approx(0.002, rel=0.1)
    assert COSTS.spread(rng) == 1.0


@pytest.mark.parametrize(("begin", "end"), [(0.05, 0.1), (0.2, 0.3)])
def test_how_outputs_repeat_is_found_from_the_drafts_of_a_worker(
    tmp_path: Path, begin: float, end: float
) -> None:
    costs, clock = replace(COSTS, repeat_begin=begin, repeat_end=end), VirtualClock()
    runner = TracedRunner(TimedRunner(costs, 1 << 26, clock), tmp_path / "steps", clock)
    engine = Engine(runner, engine_config(max_num_seqs=8), clock)
    sampling = SamplingParams(max_tokens=200, seed=0, ignore_eos=True)
    prompts = [range(1000 * i, 1000 * i + 8) for i in range(64)]
    engine.step([make_submit(str(i), ids, sampling) for i, ids in enumerate(prompts)])
    while engine.has_requests:
        engine.step([])
    fitted = fit_trace(tmp_path / "steps").costs
    assert fitted.repeat_begin == pytest.approx(begin, rel=0.3)
    assert fitted.repeat_end == pytest.approx(end, rel=0.3)


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "steps", [ARENA, *steps(50)])
    path.write_text(path.read_text() + '{"step_s": 0.0')
    assert fit_trace(path).num_steps == 50


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "0 workers"),
        ([ARENA, *steps(3)], "3 steps"),
        (steps(50), "0 work"),
        ([ARENA, *steps(50), {"step_s": 0.01, "idle": False}], "'rows'"),
    ],
)
def test_a_trace_too_short_or_without_its_fields_is_refused(
    tmp_path: Path, lines: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        fit_trace(write(tmp_path / "steps", lines))


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_text("{}\nnot json\n")
    with pytest.raises(InvalidRequest, match="line 2"):
        fit_trace(path)


def test_times_outside_the_engine_have_the_median_and_the_percentile_that_they_are_given() -> None:
    costs, rng = replace(COSTS, request_s=0.006, request_p90_s=0.011), random.Random(0)
    times_s = sorted(costs.outside(rng, is_alone=True) for _ in range(10_000))
    assert times_s[4_999] == pytest.approx(0.006, rel=0.03)
    assert times_s[8_999] == pytest.approx(0.011, rel=0.03)
    assert COSTS.outside(rng, is_alone=True) == 0.0


def test_costs_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(COSTS.to_json())
    assert read_costs(path) == COSTS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step_s": -1}, "step_s"),
        ({"token_s": "fast"}, "token_s"),
        ({"sterp_s": 1}, "sterp_s is not a cost"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"request_s": 1.0, "request_p90_s": 0.5}, "request_p90_s"),
    ],
)
def test_wrong_costs_are_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**json.loads(COSTS.to_json()), **change}))
    with pytest.raises(InvalidRequest, match=said):
        read_costs(path)
