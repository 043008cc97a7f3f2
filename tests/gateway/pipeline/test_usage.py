"""What is counted apart between two reports of usage."""

from __future__ import annotations

import asyncio

import openai
import pytest

from loraplex.api.registry import UsageEntry
from loraplex.api.registry_wire import usage_entry_to_proto
from loraplex.v1 import registry_pb2
from loraplex_services.common.limits import DEFAULT, limits_of
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.pipeline.label_limits import OTHER
from loraplex_services.gateway.pipeline.usage import (
    EPHEMERAL,
    MAX_COMBINATIONS,
    MAX_KEYS,
    MAX_NAMES,
    UsageCounter,
    _counted_as,
)
from loraplex_services.gateway.registry.usage_reports import UsageReports
from loraplex_services.gateway.request import RunningAdapter, Target
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_worker import endless


@pytest.mark.hostile
async def test_combinations_of_adapters_of_one_tenant_are_limited_for_each_day() -> None:
    """Reports are sent every five seconds, and the registry keeps each model that they name."""
    counter = UsageCounter()
    for _ in range(2):
        for number in range(MAX_COMBINATIONS + 50):
            counter._of("2026-11-03", "globex", f"globex/a{number}+globex/b").requests += 1
            counter._of("2026-11-03", "globex", f"globex/a{number}").requests += 1
        taken = counter.take()
        combined = [key.model for key in taken if "+" in key.model]
        assert len(combined) == MAX_COMBINATIONS
        assert sum(counts.requests for counts in taken.values()) == 2 * (MAX_COMBINATIONS + 50)
        assert len([key for key in taken if key.model == OTHER]) == 1
    counter._of("2026-11-03", "acme", "acme/a+acme/b")
    counter._of("2026-11-04", "globex", "globex/x+globex/y")
    assert [key.model for key in counter.take()] == ["acme/a+acme/b", "globex/x+globex/y"]


@pytest.mark.hostile
async def test_names_of_one_tenant_are_limited_for_each_day() -> None:
    counter = UsageCounter()
    names = [f"globex/a{number}" for number in range(MAX_NAMES + 50)]
    for name in names:
        counter._of("2026-11-03", "globex", name).requests += 1
        if len(counter._counts) > 1_000:
            counter.take()
    assert counter._limited("2026-11-03", "globex", names[0]) == names[0]
    assert counter._limited("2026-11-03", "globex", names[-1]) == OTHER
    assert counter._limited("2026-11-03", "acme", names[-1]) == names[-1]
    assert counter._limited("2026-11-04", "globex", names[-1]) == names[-1]


async def test_ephemeral_adapters_are_counted_together() -> None:
    once = [RunningAdapter(f"acme/once-{n}:v1", f"sha256:{n}", is_ephemeral=True) for n in range(2)]
    lasting = RunningAdapter("acme/sql:v1", "sha256:2")
    assert {_counted_as(Target("base", (each,))) for each in once} == {EPHEMERAL}
    assert _counted_as(Target("base", (lasting, once[0]))) == EPHEMERAL
    assert _counted_as(Target("base", (lasting,))) == "acme/sql"
    assert _counted_as(Target("base")) == "base"


async def test_every_ephemeral_adapter_that_was_used_is_reported_by_name() -> None:
    """Without its name, the registry would delete those first that are used most."""
    counter, received = UsageCounter(), []

    class Registry:
        async def record_usage(self, report: registry_pb2.RecordUsageRequest) -> None:
            received.append(report)

    reports = UsageReports(Registry(), counter)
    once = [RunningAdapter(f"acme/once-{n}:v1", f"sha256:{n}", is_ephemeral=True) for n in range(2)]
    lasting = RunningAdapter("acme/sql:v1", "sha256:2")
    shared = RunningAdapter("acme/shared:v1", "sha256:3", is_ephemeral=True)
    counter._note_ephemeral("globex", Target("base", (shared,)))
    for used in ((once[0],), (once[1], lasting), (lasting,)):
        counter._note_ephemeral("acme", Target("base", used))
        counter._of("2026-11-03", "acme", _counted_as(Target("base", used))).requests += 1
    await reports.send()
    await reports.send()
    (report,) = received
    assert sorted(report.ephemeral_adapters) == ["acme/once-0", "acme/once-1"]
    assert sorted(entry.model for entry in report.entries) == ["acme/sql", EPHEMERAL]


async def test_a_request_refused_by_the_queue_uses_no_tokens(stack: Stack) -> None:
    """Neither in the usage that a tenant may be billed for, nor of its tokens per second."""
    stack.registry.tenants["default"] = registry_pb2.Tenant(tenant="default", tokens_per_s=1000.0)
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.02
    stack.admission = AdmissionLimits(max_running=1, max_waiting=0)
    await stack.start()
    client = stack.openai()
    running = asyncio.create_task(
        client.completions.create(model="base", prompt="abc", max_tokens=50)
    )
    await eventually(lambda: stack.workers[0].num_live == 1)
    for _ in range(3):
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="base", prompt="a" * 400, max_tokens=1)
    answer = await running
    [counts] = stack.running._generation.usage.take().values()
    assert (counts.requests, counts.errors) == (4, 3)
    assert answer.usage is not None
    assert counts.prompt_tokens == answer.usage.prompt_tokens
    await client.completions.create(model="base", prompt="a" * 400, max_tokens=1)


@pytest.mark.hostile
def test_the_registry_accepts_the_largest_reports() -> None:
    """A report that is too large would be sent again and again, and no other one."""
    limits = limits_of("/loraplex.v1.RegistryService/RecordUsage")
    tenant, most = "t" * 96, 1 << 40
    name = f"{tenant}/{'n' * 96}"
    report = registry_pb2.RecordUsageRequest(report_id="r" * 32)
    for number in range(MAX_KEYS):
        model = "+".join([name] * (8 if number < 10 * MAX_COMBINATIONS else 1))
        entry = UsageEntry("2026-11-03", tenant, model, *(most,) * 6)
        report.entries.append(usage_entry_to_proto(entry))
        report.ephemeral_adapters.append(name)
    assert DEFAULT.max_message_bytes < report.ByteSize() < limits.max_message_bytes
