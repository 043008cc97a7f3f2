"""Staged moves at the gateway: the new version is loaded first, then the tag moves once."""

from __future__ import annotations

import pytest

from loraplex.api.residency import AdapterResidency, Tier
from loraplex.errors import DataLoss, Unavailable
from loraplex.v1 import worker_pb2
from loraplex_services.gateway.registry.snapshot import Version
from loraplex_services.gateway.registry.staging import workers_to_load
from loraplex_services.gateway.workers.view import WorkerView
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_registry import digest_of
from tests.gateway.scripted_worker import ScriptedWorker


@pytest.fixture
async def staged(stack: Stack) -> Stack:
    """`upper:prod` at v1, held by both workers; v2 is published too."""
    stack.workers = [ScriptedWorker("w0"), ScriptedWorker("w1")]
    for version in (1, 2):
        stack.registry.put("upper", version)
    stack.registry.tag("upper", "prod", {1: 1})
    await stack.start()
    for worker in stack.workers:
        device = worker_pb2.ADAPTER_TIER_DEVICE
        worker.publish(worker_pb2.AdapterResidency(digest=digest_of("upper", 1), tier=device))
    return stack


def _target(stack: Stack) -> list[int]:
    return [t.version for t in stack.registry.tags["default", "upper", "prod"].targets]


async def test_new_version_is_loaded_wherever_the_old_one_is_before_the_tag_moves(
    staged: Stack,
) -> None:
    moved_before_loads: list[bool] = []
    for worker in staged.workers:
        original = worker.publish
        worker.publish = lambda *a, o=original: (  # type: ignore[method-assign]
            moved_before_loads.append(_target(staged) == [2]),
            o(*a),
        )
    staged.registry.stage("upper", "prod", 2)
    await eventually(lambda: _target(staged) == [2])
    assert [worker.loads for worker in staged.workers] == [[digest_of("upper", 2)]] * 2
    assert moved_before_loads == [False, False]


async def test_version_that_cannot_be_loaded_leaves_the_tag_with_the_reason(staged: Stack) -> None:
    for worker in staged.workers:
        worker.fail_loads = [DataLoss("the bytes are damaged")]
    staged.registry.stage("upper", "prod", 2)
    tag = staged.registry.tags["default", "upper", "prod"]
    await eventually(lambda: not tag.pending)
    assert _target(staged) == [1]
    assert "damaged" in tag.pending_reason


async def test_failure_that_passes_is_tried_again(staged: Stack) -> None:
    staged.workers[0].fail_loads = [Unavailable("the store is away")]
    staged.registry.stage("upper", "prod", 2)
    await eventually(lambda: _target(staged) == [2])


@pytest.mark.parametrize("clock_s", [-3600.0, 3600.0])
async def test_time_limit_does_not_depend_on_how_clocks_agree(
    staged: Stack, clock_s: float
) -> None:
    for worker in staged.workers:
        worker.fail_loads = [Unavailable("the store is away")]
    staged.registry.stage("upper", "prod", 2, clock_s=clock_s)
    await eventually(lambda: _target(staged) == [2])


async def test_move_of_a_registry_that_does_not_say_what_is_left_is_made(staged: Stack) -> None:
    staged.registry.stage("upper", "prod", 2, within_s=0.0)
    await eventually(lambda: _target(staged) == [2])


async def test_move_that_takes_too_long_is_given_up(staged: Stack) -> None:
    for worker in staged.workers:
        worker.fail_loads = [Unavailable("the store is away")] * 100
    staged.registry.stage("upper", "prod", 2, within_s=0.7)
    tag = staged.registry.tags["default", "upper", "prod"]
    await eventually(lambda: not tag.pending)
    assert _target(staged) == [1]
    assert "in time" in tag.pending_reason and "store is away" in tag.pending_reason


def _view(name: str, *held: str) -> WorkerView:
    adapters = {digest: AdapterResidency(digest, Tier.DEVICE) for digest in held}
    return WorkerView(name, name, "base", connected=True, ready=True, adapters=adapters)


def test_scale_of_the_old_version_is_kept() -> None:
    version = Version("default", "upper", 2, "new", "base")
    views = [_view("a", "old"), _view("b", "old"), _view("c"), _view("d")]
    assert len(workers_to_load(views, version, ["old"])) == 2
    assert len(workers_to_load(views, version, [])) == 1
    assert workers_to_load(views, version, ["old"]) == workers_to_load(
        views[::-1], version, ["old"]
    )
    assert workers_to_load([], version, ["old"]) == []
