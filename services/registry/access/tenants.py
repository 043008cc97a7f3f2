"""Tenants and their quotas."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection

from loraplex.errors import InvalidRequest, ResourceExhausted
from loraplex_services.common import documents
from loraplex_services.common.limits import DIVERGENCE, FAIRNESS_WEIGHT, QUOTA, RATE_PER_S
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.redis_calls import CatalogDown
from loraplex_services.registry.records import TenantRecord

FIELDS = tuple(
    field.name
    for field in dataclasses.fields(TenantRecord)
    if field.name not in ("tenant", "generation")
)
"""The fields of a tenant that can be set."""

_NUMBERS = {
    "max_bytes": QUOTA,
    "max_versions": QUOTA,
    "requests_per_s": RATE_PER_S,
    "tokens_per_s": RATE_PER_S,
    "max_concurrent": QUOTA,
    "fairness_weight": FAIRNESS_WEIGHT,
    "max_kl": DIVERGENCE,
}


class Tenants:
    """Reads and writes tenants; a tenant that was never set has no limits."""

    def __init__(self, store: ObjectStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog

    async def get(self, tenant: str) -> TenantRecord:
        """A tenant's limits."""
        stored = await documents.read(self._store, layout.tenant(tenant), TenantRecord)
        return stored or TenantRecord(tenant)

    async def set(self, record: TenantRecord, fields: Collection[str] = ()) -> TenantRecord:
        """Create a tenant, or change the named `fields` of it; none named = all.

        Raises:
            InvalidRequest: a tenant has no such field, or a number is not finite or out of range.
        """
        _check_numbers(record)
        for field in fields:
            if field not in FIELDS:
                raise InvalidRequest.field("fields", field, f"must be one of {', '.join(FIELDS)}")
        wanted = {field: getattr(record, field) for field in fields or FIELDS}

        def step(current: TenantRecord | None) -> TenantRecord:
            generation = current.generation + 1 if current is not None else 1
            held = current or TenantRecord(record.tenant)
            return dataclasses.replace(held, **wanted, generation=generation)

        stored = await documents.change(
            self._store, layout.tenant(record.tenant), TenantRecord, step
        )
        assert stored is not None, "a set tenant exists"
        return stored

    async def all(self) -> list[TenantRecord]:
        """Every tenant that was set, ordered by id. Damaged records are logged and left out."""
        names = [item.key async for item in self._store.list_objects(layout.TENANTS)]
        return await documents.read_intact(self._store, names, TenantRecord)

    async def names(self) -> frozenset[str]:
        """Ids of all tenants that were set or own an adapter. Those that own one are missing while
        the index is down."""
        low, names = "-", {record.tenant for record in await self.all()}
        with contextlib.suppress(CatalogDown):
            while found := (
                await self._catalog.page("names", low, "+", 1, which="current")
            ).adapters:
                tenant = found[0][0].partition("/")[0]
                names.add(tenant)
                low = f"[{tenant}0"  # After all of its adapters, because "0" follows "/".
        return frozenset(names)

    async def begin_upload(
        self, limits: TenantRecord, upload: str, num_bytes: int, *, may_exist: bool = False
    ) -> None:
        """Count an upload that begins or continues, until it is published or refused.

        Args:
            may_exist: the tenant has all of its files already. If they are a version, publishing
                them again takes no quota; otherwise the quota is checked before one is made.

        Raises: ResourceExhausted if it exceeds the quota together with other unfinished uploads.
        """
        uploads = self._catalog.open_uploads
        if not may_exist:
            others = await uploads.num_bytes(limits.tenant, but=upload)
            await self.check_quota(limits, num_bytes, others)
        await uploads.note(limits.tenant, upload, num_bytes)

    async def check_quota(self, limits: TenantRecord, more_bytes: int, open_bytes: int = 0) -> None:
        """Raises ResourceExhausted if another version of this size exceeds the quota.

        Args:
            open_bytes: declared bytes of unfinished uploads.
        """
        if not limits.max_bytes and not limits.max_versions:
            return
        tenant = limits.tenant
        used_bytes, used_versions = await self._catalog.usage(tenant)
        way_out = "delete versions, or ask an admin to raise the quota"
        if limits.max_versions and used_versions + 1 > limits.max_versions:
            raise ResourceExhausted(
                f"tenant {tenant!r} has {used_versions} of {limits.max_versions} versions; "
                f"{way_out}",
                reason="QUOTA_VERSIONS",
            )
        if limits.max_bytes and used_bytes + open_bytes + more_bytes > limits.max_bytes:
            under_way = f", {open_bytes} are of unfinished uploads" if open_bytes else ""
            raise ResourceExhausted(
                f"tenant {tenant!r} uses {used_bytes} of {limits.max_bytes} bytes{under_way} and "
                f"this version needs {more_bytes}; {way_out}",
                reason="QUOTA_BYTES",
            )


def _check_numbers(record: TenantRecord) -> None:
    """Raises InvalidRequest."""
    for field, limits in _NUMBERS.items():
        limits.check(f"tenant.{field}", getattr(record, field))
