"""What is promised while parts fail: right answers, no hanging request, no lost publication."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.deployment import Deployment
from tests.faults.faults import FAULTS, Fault
from tests.faults.traffic import PUBLISHED, SERVED, Outcome, ask, questions_for, variant
from tests.faults.verdict import try_fault

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
FEW = ("gateway to worker-0: silent",)
"""Faults that `make test` tries; `make test-long` tries all."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    with Deployment(folder) as running:
        running.publish(SERVED)
        yield running


def _cases() -> list[object]:
    return [
        pytest.param(fault, id=fault.name, marks=() if fault.name in FEW else pytest.mark.long)
        for fault in FAULTS
    ]


@pytest.mark.parametrize("fault", _cases())
def test_a_fault_breaks_no_promise(deployment: Deployment, fault: Fault, tmp_path: Path) -> None:
    verdict = try_fault(deployment, fault, tmp_path / "traffic")
    assert verdict.num_asked
    assert verdict.violations == ()


def test_a_variant_of_an_adapter_has_other_bytes_and_the_same_answers(
    deployment: Deployment, tmp_path: Path
) -> None:
    """Otherwise the traffic would prove nothing about adapters that a worker has never seen."""
    skill = PUBLISHED[0]
    folders = [tmp_path / f"variant-{number}" for number in (1, 2, 3)]
    for number, folder in enumerate(folders, 1):
        variant(skill, number, folder)
    contents = {(folder / "adapter_model.safetensors").read_bytes() for folder in folders}
    assert len(contents) == len(folders)
    deployment.publish_folders(folders)
    for folder in folders:
        for question in questions_for(skill, folder.name):
            assert ask(deployment, question) == (Outcome.RIGHT, "")
