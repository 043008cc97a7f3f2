"""Converts usage reports, and checks the requests for them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from loraplex.errors import InvalidRequest
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.registry.index.usage import (
    COUNTERS,
    MAX_DAYS,
    Counts,
    UsageDay,
    UsageKey,
    by_key,
    field_of,
)

MAX_ENTRIES = 10_000
_DEFAULT_DAYS = 30


def report_from_proto(request: pb.RecordUsageRequest) -> dict[str, Counts]:
    """The counts of a report by day. Raises: InvalidRequest."""
    if not request.report_id or len(request.report_id) > 64:
        raise InvalidRequest.field("report_id", "", "must have 1 to 64 characters")
    if len(request.entries) > MAX_ENTRIES:
        raise InvalidRequest.field(
            "entries", len(request.entries), f"at most {MAX_ENTRIES} entries"
        )
    if len(request.ephemeral_adapters) > MAX_ENTRIES:
        num, why = len(request.ephemeral_adapters), f"at most {MAX_ENTRIES} names"
        raise InvalidRequest.field("ephemeral_adapters", num, why)
    days: dict[str, Counts] = {}
    for entry in request.entries:
        day = _day("entries.day", entry.day).isoformat()
        key = UsageKey(entry.tenant, entry.model)
        if "\n" in entry.tenant + entry.model:
            raise InvalidRequest.field("entries.model", "", "must be one line")
        counts = days.setdefault(day, {})
        for counter in COUNTERS:
            if number := getattr(entry, counter):
                name = field_of(key, counter)
                counts[name] = counts.get(name, 0) + number
    return days


def used_adapters(request: pb.RecordUsageRequest) -> set[str]:
    """Scopes of those that their own tenant used. A model of several joins these by +, and entries
    of gateways do not name ephemeral adapters. Reports spell names as they were published."""
    named = {
        scope
        for entry in request.entries
        for scope in entry.model.split("+")
        if scope.startswith(f"{entry.tenant}/")
    }
    return {scope.lower() for scope in (*named, *request.ephemeral_adapters)}


def since_from_proto(since: str, today: datetime.date) -> datetime.date:
    """The first requested day. Raises: InvalidRequest."""
    if not since:
        return today - datetime.timedelta(days=_DEFAULT_DAYS - 1)
    first = _day("since", since)
    if (today - first).days >= MAX_DAYS:
        raise InvalidRequest.field("since", since, f"must be within the last {MAX_DAYS} days")
    return first


def entries_to_proto(days: Iterable[UsageDay], tenant: str, model: str) -> list[pb.UsageEntry]:
    """Entries of one tenant ("" = all) and model ("" = all). A name without a tenant is that of an
    adapter of the entry's tenant, or the id of a base."""
    wanted = model.lower()
    return [
        pb.UsageEntry(day=day.day, tenant=key.tenant, model=key.model, **counters)
        for day in days
        for key, counters in by_key(day.counts).items()
        if tenant in ("", key.tenant)
        and wanted in ("", key.model.lower(), key.model.lower().removeprefix(f"{key.tenant}/"))
    ]


def _day(field: str, text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest.field(field, text, "must be a day as YYYY-MM-DD") from None
