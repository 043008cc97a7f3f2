"""What arrives while a step runs is taken in between layers, so that copies begin at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.api.residency import Tier
from loraplex_services.worker.types.messages import Cancel, Command
from tests.worker.engine_stage import A, B, Stage, make_runner, mixed, submit, write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("tiny"))


def arrive_during_a_step(stage: Stage, *commands: Command) -> None:
    """Run one step, after whose first layer `commands` arrive."""
    polls = [list(commands)]
    stage.engine.poll = lambda: polls.pop() if polls else []
    stage.step()
    assert not polls, "nobody asked"
    stage.engine.poll = list


def test_the_adapter_of_a_request_loads_while_a_step_runs(files: Path) -> None:
    stage = Stage(make_runner(files), files)
    alone = list(stage.run(submit("a", A, seed=2), *stage.fetched(A))["a"])
    stage.outputs.clear()
    stage.close()
    stage.step(*stage.fetched(A), submit("base", seed=1))
    assert stage.engine.cache.tier(A) is Tier.DISK
    arrive_during_a_step(stage, submit("a", A, seed=2))
    assert stage.engine.cache.tier(A) is Tier.LOADING
    assert "a" in {token.request_id for token in stage.step().tokens}, "it joins the next step"
    assert stage.run()["a"] == alone


def test_an_adapter_that_is_fetched_while_a_step_runs_loads_at_once(files: Path) -> None:
    stage = Stage(make_runner(files), files)
    stage.step(submit("base", seed=1), submit("b", B, seed=3))
    arrive_during_a_step(stage, *stage.fetched(B))
    assert stage.engine.cache.tier(B) is Tier.LOADING
    assert len(stage.run()["b"]) == 12


def test_commands_are_handled_in_order_and_no_request_ends_within_a_step(files: Path) -> None:
    stage = Stage(make_runner(files), files)
    stage.step(*stage.fetched(A, B), submit("base", seed=1))
    gone, stays = submit("gone", A), submit("stays", B)
    arrive_during_a_step(stage, gone, Cancel("gone"), Cancel("base"), stays)
    assert stage.engine.scheduler.num_running == 1, "the step that runs keeps its request"
    assert stage.engine.cache.tier(B) is Tier.DISK, "what follows a cancellation waits with it"
    outputs = stage.run()
    assert set(outputs) == {"base", "stays"} and len(outputs["stays"]) == 12
    assert len(outputs["base"]) < 12


def test_nobody_asks_while_the_batch_is_full_or_steps_overlap(files: Path) -> None:
    for overlap, max_step_tokens in (("off", 1), ("on", 64)):
        stage = Stage(make_runner(files, overlap=overlap), files, max_step_tokens)
        stage.engine.poll = lambda: pytest.fail("asked")  # type: ignore[arg-type, return-value]
        stage.run(submit("base", seed=1))


def test_tokens_do_not_depend_on_when_requests_arrive(files: Path) -> None:
    stage = Stage(make_runner(files), files)
    expected = dict(stage.run(*mixed(), *stage.fetched(A, B)))
    stage.outputs.clear()
    stage.close()
    stage.step(submit("first", seed=9, max_tokens=40))
    for command in [*stage.fetched(A), *mixed(), *stage.fetched(B)]:
        arrive_during_a_step(stage, command)
    outputs = stage.run()
    assert {name: outputs[name] for name in expected} == expected
