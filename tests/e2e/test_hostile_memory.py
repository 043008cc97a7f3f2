"""The memory of the gateway and the registry stays within their pods under every attack.

What counts is the resident memory of a service with all processes that it started, because that is
what a pod is killed for. In addition both run with an address space as large as their pod's
memory (`ulimit -v`): a single large allocation fails there even if it is never touched. With the C
library's usual number of arenas, which map memory that is never used, the registry would need more.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serving.isolation import Tenants, attack, isolated_stack
from benchmarks.serving.isolation_attacks import ATTACKS, STRANGERS
from benchmarks.serving.isolation_traffic import ordinary_traffic
from benchmarks.serving.service_processes import PeakMemory, service_processes
from tests.deploy.kustomize import containers, render

pytestmark = [pytest.mark.hostile, pytest.mark.long, pytest.mark.e2e]

BASE = Path(__file__).parents[2] / "deploy" / "k8s" / "base"
ATTACK_S = 20.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def pod_bytes() -> dict[str, int]:
    """The memory limits of the manifests, by service."""
    limits = {}
    for document in render(BASE):
        if document["kind"] == "Deployment":
            name = document["metadata"]["name"]
            limit = next(c for c in containers(document) if c["name"] == name)
            limits[name] = int(limit["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    return limits


@pytest.fixture(scope="module")
def tenants(pod_bytes: dict[str, int]) -> Iterator[Tenants]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_ARENA_MAX", "2")
        with isolated_stack() as made:
            services = dict(service_processes())
            for name in ("gateway", "registry"):
                limit = pod_bytes[name]
                resource.prlimit(services[name], resource.RLIMIT_AS, (limit, limit))
            yield made


def check(memory: PeakMemory, pod_bytes: dict[str, int]) -> None:
    peaks = {name: memory.peaks[name] for name in ("gateway", "registry")}
    print(", ".join(f"{name} {peak // MIB} MiB" for name, peak in peaks.items()))
    for name, peak in peaks.items():
        assert peak < pod_bytes[name], f"{name}: {peak // MIB} MiB"


@pytest.mark.parametrize("name", [*ATTACKS, *STRANGERS])
def test_nobody_takes_a_service_beyond_the_memory_of_its_pod(
    tenants: Tenants, pod_bytes: dict[str, int], name: str
) -> None:
    statuses: Counter[str] = Counter()
    with PeakMemory() as memory, attack(name, tenants.attacker, statuses):
        time.sleep(ATTACK_S)
    print(name, dict(statuses))
    check(memory, pod_bytes)
    kind = {**ATTACKS, **STRANGERS}[name][-1]
    waits = asyncio.run(ordinary_traffic(tenants.ordinary, "upper", kind, 2.0))
    assert waits.statuses.total() and not waits.num_failed, waits.statuses
