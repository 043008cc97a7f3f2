"""The memory of the gateway and the registry stays within their pods under every attack.

What counts is the resident memory of a service with all processes that it started, because that is
what a pod is killed for. A limit on the address space (`ulimit -v`) would count what is mapped and
never touched: the stacks of threads, the arenas of the C library, shared libraries.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from benchmarks.serving.isolation import Tenants, attack, isolated_stack
from benchmarks.serving.isolation_attacks import ATTACKS
from benchmarks.serving.isolation_traffic import Target, ordinary_traffic, post
from benchmarks.serving.process_memory import PeakMemory
from tests.deploy.kustomize import containers, render

pytestmark = [pytest.mark.hostile, pytest.mark.long, pytest.mark.e2e]

BASE = Path(__file__).parents[2] / "deploy" / "k8s" / "base"
ATTACK_S = 20.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def tenants() -> Iterator[Tenants]:
    with isolated_stack() as made:
        yield made


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


def check(memory: PeakMemory, pod_bytes: dict[str, int]) -> None:
    peaks = {name: memory.peaks[name] for name in ("gateway", "registry")}
    print(", ".join(f"{name} {peak // MIB} MiB" for name, peak in peaks.items()))
    for name, peak in peaks.items():
        assert peak < pod_bytes[name], f"{name}: {peak // MIB} MiB"


@pytest.mark.parametrize("resource", ATTACKS)
def test_a_tenant_with_a_key_takes_no_service_beyond_the_memory_of_its_pod(
    tenants: Tenants, pod_bytes: dict[str, int], resource: str
) -> None:
    with PeakMemory() as memory, attack(resource, tenants.attacker, Counter()):
        time.sleep(ATTACK_S)
    check(memory, pod_bytes)
    kind = ATTACKS[resource][-1]
    waits = asyncio.run(ordinary_traffic(tenants.ordinary, "upper", kind, 2.0))
    assert waits.statuses.total() and not waits.num_failed, waits.statuses


def test_strangers_without_a_key_take_no_service_beyond_the_memory_of_its_pod(
    tenants: Tenants, pod_bytes: dict[str, int]
) -> None:
    with PeakMemory() as memory:
        asyncio.run(_large_messages(tenants.ordinary.registry))
        asyncio.run(_wrong_keys(tenants.ordinary))
    check(memory, pod_bytes)
    waits = asyncio.run(ordinary_traffic(tenants.ordinary, "upper", "text", 2.0))
    assert waits.statuses.total() and not waits.num_failed, waits.statuses


async def _large_messages(registry: str) -> None:
    """Messages whose parsed form has 33 times their size."""
    raw = b"\x12\x00" * (8 * MIB)
    async with grpc.aio.insecure_channel(registry) as channel:
        create = channel.unary_unary("/loraplex.v1.RegistryService/CreateUpload")
        codes = set()
        for _ in range(10):
            calls = [create(raw) for _ in range(6)]
            codes |= {await call.code() for call in calls}
    assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}


async def _wrong_keys(target: Target) -> None:
    """Keys that nobody has, from one address."""
    statuses = set()
    for number in range(5000):
        wrong = Target(target.host, target.port, "", f"lpx_{number:08}_{'x' * 24}")
        status, _, writer = await post(wrong, "/v1/completions", b"{}")
        writer.close()
        statuses.add(status)
    assert statuses == {401, 429}
