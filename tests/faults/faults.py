"""The faults, and what is promised while each lasts and after it."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.faults.deployment import Deployment, Service, wait_s
from tests.faults.links import Disturbance
from tests.faults.traffic import Outcome

NEVER = frozenset({Outcome.WRONG, Outcome.HUNG, Outcome.DROPPED, Outcome.UNKNOWN})
ALWAYS = frozenset({Outcome.RIGHT})
REFUSED_TOO = ALWAYS | {Outcome.REFUSED}
CUT_TOO = REFUSED_TOO | {Outcome.CUT}
FEW_FILES = 3
"""Open files that a starved process may have: it has more, so it can open nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. The sets name the outcomes that its promise allows while it lasts."""

    name: str
    begin: Callable[[Deployment], None]
    end: Callable[[Deployment], None]
    lasts_s: float = 4.0
    asked: frozenset[Outcome] = ALWAYS
    """Of requests for adapters that are in use."""
    fresh: frozenset[Outcome] = REFUSED_TOO
    """Of first requests for an adapter that was published during the fault."""
    published: frozenset[Outcome] = REFUSED_TOO
    """Of publications. An acknowledged one is never lost, whatever the fault."""

    @contextmanager
    def happening(self, deployment: Deployment) -> Iterator[None]:
        """The fault, until the end of the block."""
        self.begin(deployment)
        try:
            yield
        finally:
            self.end(deployment)


def _disturbed(link: str, how: Disturbance, **promise: frozenset[Outcome]) -> Fault:
    return Fault(
        f"{link.replace('-', ' to ', 1)}: {how.value}",
        lambda deployment: deployment.links[link].disturb(how),
        lambda deployment: deployment.links[link].disturb(Disturbance.NONE),
        **promise,  # type: ignore[arg-type]
    )


def _workers_gone(how: Disturbance) -> Fault:
    def disturb(deployment: Deployment, how: Disturbance) -> None:
        for number in range(2):
            deployment.links[f"gateway-worker-{number}"].disturb(how)

    return Fault(
        f"gateway to every worker: {how.value}",
        lambda deployment: disturb(deployment, how),
        lambda deployment: disturb(deployment, Disturbance.NONE),
        asked=CUT_TOO,
        fresh=CUT_TOO,
    )


def _killed(service: str, **promise: frozenset[Outcome]) -> Fault:
    """SIGKILL, and a supervisor that starts it again two seconds later."""
    return Fault(
        f"{service}: killed",
        lambda deployment: deployment.services[service].kill(),
        lambda deployment: deployment.services[service].start(),
        lasts_s=2.0,
        **promise,  # type: ignore[arg-type]
    )


def _paused(service: str, **promise: frozenset[Outcome]) -> Fault:
    return Fault(
        f"{service}: stopped for 4 s (SIGSTOP)",
        lambda deployment: deployment.services[service].pause(),
        lambda deployment: deployment.services[service].resume(),
        **promise,  # type: ignore[arg-type]
    )


def _starved(
    service: str, what: int, value: int, said: str, **promise: frozenset[Outcome]
) -> Fault:
    had: list[int] = []
    return Fault(
        f"{service}: {said}",
        lambda deployment: had.append(deployment.services[service].limit(what, value)),
        lambda deployment: _restored(deployment.services[service], what, had.pop()),
    )


def _restored(service: Service, what: int, value: int) -> None:
    service.limit(what, value)


_BROKEN = (Disturbance.RESET, Disturbance.REFUSED, Disturbance.SILENT, Disturbance.TORN)
_LINKS = ("gateway-registry", "gateway-metadata", "registry-metadata", "registry-store")
_NO_MORE_BYTES = "files can grow no more, as on a full disk"

FAULTS: tuple[Fault, ...] = (
    *(_disturbed(link, how) for link in _LINKS for how in (Disturbance.DELAYED, *_BROKEN)),
    *(_disturbed("worker-store", how) for how in (Disturbance.DELAYED, *_BROKEN)),
    _disturbed("worker-store", Disturbance.CORRUPT),
    _disturbed("registry-store", Disturbance.CORRUPT),
    *(_disturbed("gateway-worker-0", how) for how in (Disturbance.DELAYED, *_BROKEN)),
    *(_workers_gone(how) for how in (Disturbance.RESET, Disturbance.REFUSED, Disturbance.SILENT)),
    _killed("worker-0"),
    _killed("registry"),
    _killed("metadata"),
    _killed("gateway", asked=CUT_TOO | {Outcome.DROPPED}, fresh=CUT_TOO | {Outcome.DROPPED}),
    *(_paused(name) for name in ("worker-0", "registry", "metadata", "gateway")),
    _starved("registry", resource.RLIMIT_NOFILE, FEW_FILES, "no more file descriptors"),
    _starved("worker-0", resource.RLIMIT_NOFILE, FEW_FILES, "no more file descriptors"),
    _starved("worker-0", resource.RLIMIT_FSIZE, 4096, _NO_MORE_BYTES),
    _starved("registry", resource.RLIMIT_FSIZE, 4096, _NO_MORE_BYTES),
)


def let_last(fault: Fault) -> None:
    """Wait as long as the fault lasts."""
    wait_s(fault.lasts_s)
