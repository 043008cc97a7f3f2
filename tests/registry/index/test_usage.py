"""What tenants used: added once, kept apart by tenant and model, and copied to the store."""

from __future__ import annotations

import datetime

import pytest

from loraplex.errors import InvalidRequest
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common import documents
from loraplex_services.registry import layout
from loraplex_services.registry.api.usage import (
    entries_to_proto,
    report_from_proto,
    since_from_proto,
)
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index.usage import UsageDay

DAY = datetime.date(2026, 11, 3)


def _report(tenant: str, model: str, requests: int, day: str = "2026-11-03") -> pb.UsageEntry:
    return pb.UsageEntry(
        day=day, tenant=tenant, model=model, requests=requests, generated_tokens=7 * requests
    )


async def _add(registry: Registry, report_id: str, *entries: pb.UsageEntry) -> None:
    request = pb.RecordUsageRequest(report_id=report_id, entries=entries)
    await registry.usage.add(report_id, report_from_proto(request))


async def _entries(registry: Registry, tenant: str = "", model: str = "") -> list[tuple[str, int]]:
    days = await registry.usage.read(DAY, DAY + datetime.timedelta(days=1), tenant)
    assert not tenant or all(name.startswith(f"{tenant}\n") for day in days for name in day.counts)
    found = entries_to_proto(days, tenant, model)
    assert all(entry.generated_tokens == 7 * entry.requests for entry in found)
    return [(f"{entry.day[-2:]} {entry.tenant} {entry.model}", entry.requests) for entry in found]


async def test_a_name_without_a_tenant_selects_the_tenant_s_adapter_or_a_base(
    registry: Registry,
) -> None:
    await _add(registry, "1", _report("a", "a/X", 2), _report("a", "b/x", 1), _report("a", "y", 4))
    assert await _entries(registry, "a", "x") == [("03 a a/X", 2)]
    assert await _entries(registry, "a", "b/x") == [("03 a b/x", 1)]
    assert await _entries(registry, "a", "y") == [("03 a y", 4)]
    assert await _entries(registry, "a", "nobody") == []


async def test_reports_add_up_and_the_same_report_counts_once(registry: Registry) -> None:
    await _add(registry, "1", _report("a", "a/x", 2), _report("b", "base", 1))
    await _add(registry, "2", _report("a", "a/x", 3), _report("a", "a/x", 1, "2026-11-04"))
    await _add(registry, "2", _report("a", "a/x", 3))
    assert await _entries(registry) == [("03 a a/x", 5), ("03 b base", 1), ("04 a a/x", 1)]
    assert await _entries(registry, tenant="b") == [("03 b base", 1)]
    assert await _entries(registry, model="a/x") == [("03 a a/x", 5), ("04 a a/x", 1)]


async def test_a_copy_stands_in_for_what_the_metadata_server_lost(registry: Registry) -> None:
    await _add(registry, "1", _report("a", "a/x", 2))
    await registry.usage.copy(DAY)
    copied = await documents.read(registry.store, layout.usage("2026-11-03"), UsageDay)
    assert copied is not None and copied.counts["a\na/x\nrequests"] == 2
    await registry.catalog._redis.flushall()
    assert await _entries(registry) == await _entries(registry, "a") == [("03 a a/x", 2)]
    assert await _entries(registry, "b") == []
    await _add(registry, "2", _report("a", "a/x", 3))
    assert await _entries(registry) == [("03 a a/x", 5)], "counted on from the copy"
    await registry.usage.copy(DAY)
    again = await documents.read(registry.store, layout.usage("2026-11-03"), UsageDay)
    assert again is not None and (again.counts["a\na/x\nrequests"], again.generation) == (5, 2)


@pytest.mark.parametrize("since", ["yesterday", "2026-13-01", "2020-01-01"])
def test_a_day_that_cannot_be_is_refused(since: str) -> None:
    with pytest.raises(InvalidRequest):
        since_from_proto(since, DAY)


def test_without_a_day_the_last_thirty_are_meant() -> None:
    assert since_from_proto("", DAY) == datetime.date(2026, 10, 5)
