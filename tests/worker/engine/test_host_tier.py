"""Images in host memory, on a runner that copies through the cache of a GPU's worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.api.residency import AdapterResidency, Tier
from loraplex.errors import ResourceExhausted
from loraplex_services.worker.adapters.device.pinned_cache import PinnedCache
from loraplex_services.worker.types.messages import Gone, StepOutput, UnloadAdapter
from tests.worker.engine_stage import A, B, Stage, make_runner, submit, write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("host"))


@pytest.fixture
def stage(files: Path) -> Iterator[Stage]:
    stage = Stage(make_runner(files), files)
    stage.runner._adapters._host = PinnedCache(stage.runner.arena, 4 << 20)
    yield stage
    stage.close()


class Watcher:
    """What gateways know after all reports of an engine."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.known: dict[str, AdapterResidency] = {}

    def step(self, *commands: object) -> None:
        self._take(self.stage.step(*commands))
        while self.stage.engine.has_requests:
            self._take(self.stage.step())

    def _take(self, output: StepOutput) -> None:
        self.known |= {c.residency.digest: c.residency for c in output.residency}


def test_an_evicted_adapter_is_on_the_host_and_loads_from_there(stage: Stage) -> None:
    watcher = Watcher(stage)
    watcher.step(*stage.fetched(A), submit("first", A))
    assert watcher.known[A].tier is Tier.DEVICE
    assert 0 < watcher.known[A].host_bytes <= watcher.known[A].device_bytes
    watcher.step(UnloadAdapter(A))
    assert watcher.known[A].tier is Tier.HOST
    assert (watcher.known[A].device_bytes, watcher.known[A].running_requests) == (0, 0)
    watcher.step(submit("second", A))
    assert watcher.known[A].tier is Tier.DEVICE
    assert stage.outputs["second"] == stage.outputs["first"]


def with_space_for_one(stage: Stage) -> Watcher:
    """A and B on disk, where the host has space for one of them, and A on the device again."""
    watcher = Watcher(stage)
    watcher.step(*stage.fetched(A, B), submit("a", A), submit("b", B))
    both = [watcher.known[digest].device_bytes for digest in (A, B)]
    stage.runner._adapters._host = PinnedCache(stage.runner.arena, max(both))
    watcher.step(UnloadAdapter(A), UnloadAdapter(B))
    watcher.step(submit("a again", A))
    return watcher


def test_an_image_that_makes_way_for_another_is_on_disk_only(stage: Stage) -> None:
    watcher = with_space_for_one(stage)
    watcher.step(submit("b again", B))
    watcher.step(UnloadAdapter(A), UnloadAdapter(B))
    assert (watcher.known[A].tier, watcher.known[A].host_bytes) == (Tier.DISK, 0)
    assert watcher.known[B].tier is Tier.HOST


def test_an_image_that_makes_way_is_on_disk_even_if_the_other_cannot_be_entered(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = with_space_for_one(stage)
    watcher.step(UnloadAdapter(A))
    assert watcher.known[A].tier is Tier.HOST

    def refuse(slot: int, copied: object) -> None:
        raise ResourceExhausted("the tables are full")

    monkeypatch.setattr(stage.runner, "enter_adapter", refuse)
    watcher.step(submit("b again", B))
    assert "b again" in stage.failures
    assert watcher.known[A].tier is Tier.DISK
    assert watcher.known[B].tier is Tier.HOST


def test_files_that_are_gone_leave_nothing_to_load_from(stage: Stage) -> None:
    watcher = Watcher(stage)
    watcher.step(*stage.fetched(A), submit("first", A))
    watcher.step(UnloadAdapter(A), Gone(A))
    assert watcher.known[A].tier is Tier.NONE
