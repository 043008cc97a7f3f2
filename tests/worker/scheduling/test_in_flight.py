"""What may be given away while a step is in flight."""

from __future__ import annotations

from tests.worker.scheduling.stage import SIZES, Stage, make_request


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
    assert stage.cache.get("sha256:c").blocks == []
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
