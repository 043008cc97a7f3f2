"""Runs one fault under traffic and says which promises were broken."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.stack import eventually
from tests.faults.deployment import Deployment, wait_s
from tests.faults.faults import ALWAYS, Fault, let_last
from tests.faults.traffic import SERVED, Outcome, Record, Traffic, ask, questions_for

BEFORE_S = 1.0
RECOVERY_S = 30.0
"""This long after the end of a fault, all workers are ready and all that was published answers."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run of a fault showed."""

    fault: str
    num_asked: int
    num_fresh: int
    num_published: int
    num_refused: int
    """Requests and publications that ended in an error that the promise allows."""
    slowest_s: float
    violations: tuple[str, ...]


def try_fault(deployment: Deployment, fault: Fault, folder: Path, period_s: float = 0.0) -> Verdict:
    """Run traffic through a fault, and look afterwards that everything works again.

    The traffic ends `period_s` seconds after its begin, but not before everything is ready again.
    """
    folder.mkdir()
    traffic = Traffic(deployment, folder)
    end_s = time.monotonic() + period_s
    with traffic.running():
        wait_s(BEFORE_S)
        with fault.happening(deployment):
            let_last(fault)
        violations = [*_not_recovered(deployment)]
        wait_s(max(0.0, end_s - time.monotonic()))
    records = (
        ("request", traffic.asked, fault.asked),
        ("first request", traffic.fresh, fault.fresh),
        ("publication", traffic.published, fault.published),
    )
    for work, record, allowed in records:
        violations += _broken(work, record, allowed)
    with contextlib.suppress(AssertionError):
        eventually(lambda: not traffic.lost(), RECOVERY_S)
    violations += [f"lost: {said}" for said in traffic.lost()]
    after = Record()
    for skill in SERVED:
        after.take(*ask(deployment, questions_for(skill)[0]), 0.0)
    violations += _broken("request afterwards", after, ALWAYS)
    return Verdict(
        fault.name,
        traffic.asked.outcomes.total(),
        traffic.fresh.outcomes.total(),
        traffic.published.outcomes.total(),
        sum(r.outcomes.total() - r.outcomes[Outcome.RIGHT] for _, r, _ in records),
        max(record.slowest_s for _, record, _ in records),
        tuple(violations),
    )


def _not_recovered(deployment: Deployment) -> list[str]:
    try:
        eventually(deployment.is_ready, RECOVERY_S)
    except AssertionError:
        missing = deployment.missing()
        return [
            f"not recovered {RECOVERY_S:.0f} s after the end of the fault: {missing}\n"
            + deployment.evidence()
        ]
    return []


def _broken(work: str, record: Record, allowed: frozenset[Outcome]) -> list[str]:
    return [
        f"{count} of {record.outcomes.total()} {work}s {outcome.value}: {record.said[outcome]}"
        for outcome, count in record.outcomes.items()
        if outcome not in allowed
    ]
