"""Clocks that jump: every promise of the other faults holds (`test_faults`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.deployment import Deployment
from tests.faults.faults import Fault
from tests.faults.traffic import SERVED
from tests.faults.verdict import try_fault

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]
HOUR_S = 3600


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip("libfaketime is not installed (apt-get install libfaketime)")
    folder = tmp_path_factory.mktemp("deployment")
    with Deployment(folder, faketime=found[0]) as running:
        running.publish(SERVED)
        yield running


@pytest.mark.parametrize("service", ["gateway", "registry", "worker-0", "metadata"])
@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
def test_a_clock_that_jumps_by_an_hour_and_back_breaks_no_promise(
    deployment: Deployment, service: str, offset_s: int, tmp_path: Path
) -> None:
    fault = Fault(
        f"{service}: its clock jumps",
        lambda deployment: deployment.set_clock(service, offset_s),
        lambda deployment: deployment.set_clock(service, 0),
    )
    verdict = try_fault(deployment, fault, tmp_path / "traffic")
    assert verdict.num_asked and verdict.num_published
    assert verdict.violations == ()
