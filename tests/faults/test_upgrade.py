"""Releases N and N + 1 run together: services are replaced one by one under load, and back again.

The release before is the last tag, or the commit that UPGRADE_FROM names:

    UPGRADE_FROM=v0.1.0 pytest -m long tests/faults/test_upgrade.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest

from tests.e2e.stack import REPO, eventually
from tests.faults.deployment import Deployment
from tests.faults.faults import ALWAYS, CUT_TOO, REFUSED_TOO
from tests.faults.traffic import SERVED, Outcome, Record, Traffic

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]
UP = ("registry", "worker-0", "worker-1", "gateway")
"""The order of docs/operate/upgrade.md; a rollback is the reverse."""
TOGETHER_S = 5.0
"""How long a mix of releases serves before the next service is replaced."""
READY_S = 60.0


def _release() -> str:
    if named := os.environ.get("UPGRADE_FROM"):
        return named
    tags = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    return subprocess.run(tags, cwd=REPO, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the release before."""
    release = _release()
    if not release:
        pytest.skip("nothing is released yet: name a commit in UPGRADE_FROM")
    root = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", release], cwd=REPO, check=True, capture_output=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(root, filter="fully_trusted")
    # Otherwise both workers would compile them at their start.
    build = [sys.executable, "-m", "loraplex_services.worker.native.build"]
    environ = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run(build, cwd=root, env=environ, check=True, capture_output=True)
    return root


@contextmanager
def served(deployment: Deployment, folder: Path, replaced: str) -> Iterator[None]:
    """Traffic while a service is replaced and for some time after; checks every outcome."""
    folder.mkdir()
    traffic = Traffic(deployment, folder)
    with traffic.running():
        yield
        eventually(deployment.is_ready, READY_S)
        time.sleep(TOGETHER_S)
    is_gateway = replaced == "gateway"
    # There is one gateway only: while it is replaced nobody listens.
    allowed = CUT_TOO | {Outcome.DROPPED} if is_gateway else ALWAYS
    assert _others(traffic.asked, allowed) == {}
    assert _others(traffic.fresh, allowed | REFUSED_TOO) == {}
    assert _others(traffic.published, REFUSED_TOO) == {}
    assert traffic.asked.outcomes[Outcome.RIGHT] > 0 < traffic.published.outcomes[Outcome.RIGHT]
    assert traffic.lost() == []


def _others(record: Record, allowed: frozenset[Outcome]) -> dict[Outcome, str]:
    """What was said with outcomes that are not allowed."""
    return {outcome: said for outcome, said in record.said.items() if outcome not in allowed}


def test_services_of_two_releases_serve_together_up_and_down(before: Path, tmp_path: Path) -> None:
    steps = [*((name, REPO) for name in UP), *((name, before) for name in reversed(UP))]
    with Deployment(tmp_path, before) as deployment:
        deployment.publish(SERVED)
        for place, (name, root) in enumerate(steps):
            begin_s = time.monotonic()
            with served(deployment, tmp_path / f"step{place}", name):
                deployment.services[name].replace(root)
            print(f"{name} -> {root.name}: {time.monotonic() - begin_s:.0f} s")
