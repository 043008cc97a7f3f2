"""The usage of tenants per day, counted in the metadata server and copied to the object store.

A day is one hash. Its fields name tenant, model and counter. Copies are taken regularly and cover
days that the metadata server has lost.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from loraplex_services.common import documents
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.redis_calls import CatalogDown

MAX_DAYS = 400
_COPIED_DAYS = 3
"""Number of days that may still change: reports of a day arrive a little after its end."""
COUNTERS = (
    "requests",
    "errors",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "duration_ms",
)

Counts = dict[str, int]
"""Numbers by `field_of`."""


@dataclass(frozen=True, slots=True)
class UsageKey:
    """The tenant and the model of a count."""

    tenant: str
    model: str


@dataclass(frozen=True, slots=True)
class UsageDay:
    """The counts of one day, as a document."""

    day: str
    counts: Counts = field(default_factory=dict)
    generation: int = 1


def field_of(key: UsageKey, counter: str) -> str:
    """Names and ids hold no line breaks."""
    return f"{key.tenant}\n{key.model}\n{counter}"


class UsageBook:
    """Adds reports and reads them back."""

    def __init__(self, store: ObjectStore, catalog: Catalog) -> None:
        self._store = store
        self._counters = catalog.usage_counters

    async def add(self, report_id: str, days: Mapping[str, Counts]) -> None:
        """Add a report, once. Raises: CatalogDown."""
        for day in days:
            if not await self._counters.has(day):
                await self._counters.seed(day, await self._copy(day))
        await self._counters.add(report_id, days)

    async def read(
        self, since: datetime.date, until: datetime.date, tenant: str = ""
    ) -> list[UsageDay]:
        """The days from one to another that have counts of a tenant ("" = all), oldest first. What
        others used takes no memory: 400 days of all tenants may be gigabytes."""
        found = []
        for day in _days(since, until):
            counts = await self._counts(day, f"{tenant}\n" if tenant else "")
            if counts:
                found.append(UsageDay(day, counts))
        return found

    async def copy(self, today: datetime.date) -> None:
        """Copy the newest days to the object store. Raises: CatalogDown."""
        for day in _days(today - datetime.timedelta(days=_COPIED_DAYS - 1), today):
            counts = await self._counters.of_day(day)
            if counts:
                step = functools.partial(_merged, day, counts)
                await documents.change(self._store, layout.usage(day), UsageDay, step)

    async def _counts(self, day: str, begin: str) -> Counts:
        """Counts of the fields whose names begin with a prefix."""
        try:
            counts = await self._counters.of_day(day, begin)
            if counts or await self._counters.has(day):
                return counts
        except CatalogDown:
            pass
        copy = await self._copy(day)
        return {name: number for name, number in copy.items() if name.startswith(begin)}

    async def _copy(self, day: str) -> Counts:
        stored = await documents.read(self._store, layout.usage(day), UsageDay)
        return {} if stored is None else stored.counts


def _merged(day: str, counts: Counts, old: UsageDay | None) -> UsageDay | None:
    """The larger of each count: they only grow."""
    if old is None:
        return UsageDay(day, counts)
    merged = old.counts | {
        name: max(number, old.counts.get(name, 0)) for name, number in counts.items()
    }
    return (
        None if merged == old.counts else replace(old, counts=merged, generation=old.generation + 1)
    )


def by_key(counts: Counts) -> dict[UsageKey, dict[str, int]]:
    """The counters of each tenant and model, in their order."""
    found: dict[UsageKey, dict[str, int]] = {}
    for name in sorted(counts):
        tenant, model, counter = name.split("\n")
        found.setdefault(UsageKey(tenant, model), {})[counter] = counts[name]
    return found


def _days(since: datetime.date, until: datetime.date) -> Iterable[str]:
    for number in range((until - since).days + 1):
        yield (since + datetime.timedelta(days=number)).isoformat()
