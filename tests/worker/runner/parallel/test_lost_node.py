"""A machine of a group is lost: a network namespace whose link is set down, so that nobody says
goodbye."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex_services.worker.runner.building import build_runner
from tests.worker import tiny
from tests.worker.nodes import other_node
from tests.worker.parity.driving import Driver, Job, greedy

PATIENCE_S = 120.0
HERE, THERE = "10.93.71.1", "10.93.71.2"
SETTINGS = {"device": "cpu", "dtype": "float32", "arena_bytes": 1 << 20}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespace() -> Iterator[str]:
    """The name of a namespace, which is reached over a link of the same name."""
    name = f"lpx{os.getpid()}"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot make network namespaces")
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", name)
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", "eth0")
        ip("link", "set", name, "up")
        ip("-n", name, "link", "set", "eth0", "up")
        yield name
    finally:
        ip("netns", "del", name)  # and the link


@pytest.mark.long
def test_ranks_of_another_network_serve_until_the_link_is_lost(namespace, tmp_path) -> None:
    base = tiny.write_base(tmp_path / "base")
    elsewhere = shutil.copytree(base, tmp_path / "elsewhere", copy_function=shutil.copy)
    adapter = tiny.write_adapter(tmp_path / "adapter", seed=1, rank=8)
    ended: list[int] = []
    has_ended = threading.Event()

    def on_end(rank: int, code: int) -> None:
        ended.append(rank)
        has_ended.set()

    prefix = ("ip", "netns", "exec", namespace)
    with other_node(2, Path(elsewhere), HERE, prefix) as (nodes, [rank]):
        group = build_runner(base, num_ranks=2, nodes=nodes, on_rank_end=on_end, **SETTINGS)
        outputs = []
        for runner in (group, build_runner(base, **SETTINGS)):
            driver = Driver(runner)
            driver.load(3, adapter)
            jobs = [Job(greedy("r", [3, 1, 4, 1, 5], 12), ((3, 1.0),)), Job(greedy("b", [2], 12))]
            outputs.append(driver.run(jobs))
        assert outputs[0] == outputs[1]
        ip("link", "set", namespace, "down")
        assert has_ended.wait(PATIENCE_S)
        assert ended == [1]
        assert rank.wait(PATIENCE_S) == 0
        group.close()
