"""What may be given away while a step is in flight."""

from __future__ import annotations

from tests.worker.scheduling.stage import SIZES, AnyToken, Stage, make_request


def test_blocks_of_an_adapter_come_back_only_after_the_last_step_that_reads_them() -> None:
    stage = Stage(overlaps=True)
    stage.fetch("sha256:c")
    stage.submit(make_request("r", 3, 9, ("sha256:c",)))
    for _ in range(3):
        stage.step()
    assert stage.in_flight
    stage.scheduler.remove("r", stage.now)
    num_free = stage.arena.num_free
    stage.cache.unload("sha256:c")
    assert stage.cache.get("sha256:c").first_pages == []
    assert stage.arena.num_free == num_free
    stage.step()
    assert not stage.in_flight
    assert stage.arena.num_free == num_free + SIZES["sha256:c"]


def test_an_adapter_that_no_step_reads_gives_its_blocks_at_once() -> None:
    stage = Stage(overlaps=True)
    stage.fetch("sha256:c")
    stage.cache.load(["sha256:c"], (), 0.0)
    stage.submit(make_request("base", 3, 9))
    for _ in range(2):
        stage.step()
    assert stage.in_flight
    num_free = stage.arena.num_free
    stage.cache.unload("sha256:c")
    assert stage.arena.num_free == num_free + SIZES["sha256:c"]


def names(stage: Stage) -> list[str]:
    """Requests of the next step."""
    return [row.request.request_id for row in stage.step().rows]


def test_a_grammar_that_needs_long_delays_its_own_request_alone() -> None:
    stage = Stage(overlaps=True)
    stage.submit(make_request("slow", 3, 9, constraint=AnyToken()), make_request("free", 3, 9))
    assert names(stage) == ["slow", "free"]
    assert [names(stage) for _ in range(4)] == [["free"], ["slow", "free"]] * 2
    stage.run_dry()


def test_a_quick_grammar_delays_nobody() -> None:
    stage = Stage(overlaps=True)
    quick = make_request("quick", 3, 9, constraint=AnyToken(is_quick=True))
    stage.submit(quick, make_request("free", 3, 9))
    plans = [stage.step() for _ in range(5)]
    assert all(len(plan.rows) == 2 for plan in plans)
    assert [plan.awaits_masks for plan in plans] == [False, True, True, True, True]


def test_a_grammar_alone_that_needs_long_goes_on_as_fast_as_without_overlap() -> None:
    stage = Stage(overlaps=True)
    stage.submit(make_request("slow", 3, 4, constraint=AnyToken()))
    assert [len(stage.step().rows) for _ in range(5)] == [1, 0, 1, 0, 1]
