"""Bases: the frozen models that adapters are checked against."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from loraplex.errors import (
    AlreadyExists,
    DataLoss,
    InvalidAdapter,
    Unavailable,
    Violation,
)
from loraplex.refs import check_base_id
from loraplex_services.common import documents
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.items import BASES_SCOPE, base_item
from loraplex_services.registry.index.redis_calls import CatalogDown
from loraplex_services.registry.publish.base_names import is_copy
from loraplex_services.registry.records import BaseRecord

_BASE_FIELD = "adapter_config.json:base_model_name_or_path"


class Bases:
    """The registered bases."""

    def __init__(self, store: ObjectStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._known: dict[str, BaseRecord] = {}
        """Bases that adapters were checked against, with their modules."""

    async def register(self, base: BaseRecord, *, replace: bool) -> BaseRecord:
        """Record a base; the same id with another geometry is refused unless `replace`.

        Aliases are added to those that are known, and a largest rank that is not given stays.

        Raises:
            InvalidRequest: the id is malformed.
            AlreadyExists: the id belongs to another base or to an adapter.
        """
        check_base_id(base.base_id, field="base.base_id")
        await self._check_no_adapter(base.base_id)

        def step(current: BaseRecord | None) -> BaseRecord | None:
            if current is None:
                return dataclasses.replace(base, generation=1)
            united = tuple(sorted({*current.aliases, *base.aliases}))
            changed = current.geometry.fingerprint != base.geometry.fingerprint
            if changed and not replace:
                raise AlreadyExists(
                    f"base {base.base_id!r} is registered with another geometry "
                    f"({current.geometry.fingerprint}); choose another id, or replace it"
                )
            merged = dataclasses.replace(
                base,
                generation=current.generation,
                aliases=base.aliases if changed else united,
                max_lora_rank=base.max_lora_rank or current.max_lora_rank,
            )
            if merged == current:
                return None
            return dataclasses.replace(merged, generation=current.generation + 1)

        operation = await self._catalog.note_pending(BASES_SCOPE)
        stored = await documents.change(self._store, layout.base(base.base_id), BaseRecord, step)
        assert stored is not None, "a registered base exists"
        await self._catalog.apply(BASES_SCOPE, [base_item(stored)], operation=operation)
        return stored

    async def get(self, base_id: str) -> BaseRecord | None:
        """A base with its geometry."""
        return await documents.read(self._store, layout.base(base_id), BaseRecord)

    async def all(self) -> list[BaseRecord]:
        """Every base with its geometry, ordered by id."""
        bases = await documents.read_folder(self._store, layout.BASES, BaseRecord)
        return sorted(bases, key=lambda base: base.base_id)

    async def summaries(self) -> list[BaseRecord]:
        """Every base without its modules: from the index, or from the objects where it is
        unreachable."""
        try:
            return await self._catalog.bases()
        except CatalogDown:
            return await self.all()

    async def check_upload(self, tenant: str, name: str, wanted: str) -> list[BaseRecord]:
        """Refuse an upload with an impossible name or base before its bytes are sent. Returns every
        base without its modules.

        Raises:
            AlreadyExists: the adapter would have the id of a base.
            Unavailable: no base is known yet.
            InvalidAdapter: there are bases, but none is called `wanted`.
        """
        bases = await self.summaries()
        ids = {base.base_id.lower() for base in bases}
        for taken in (name, f"{tenant}/{name}"):
            if taken in ids:
                raise AlreadyExists(f"{taken!r} is the id of a base; choose another adapter name")
        if not bases:
            raise _no_base()
        if wanted and _by_name(bases, wanted) is None:
            raise _unknown("base", wanted, bases)
        return bases

    async def choose(
        self, wanted: str, named: str, known: Sequence[BaseRecord] = ()
    ) -> tuple[BaseRecord, list[Violation]]:
        """Choose the base of an adapter; returns it, with its geometry, and warnings about the
        choice.

        `wanted`, else the base that the config names, else the one whose copy it names, else the
        only one known.

        Args:
            named: `base_model_name_or_path` of the config; may be empty.
            known: what `check_upload` has just returned; empty = not asked.

        Raises:
            Unavailable: no base is known yet.
            InvalidAdapter: none of several fits; lists them.
        """
        bases = list(known) or await self.summaries()
        chosen = _chosen(bases, wanted, named)
        if chosen is None:  # The index may lack a base.
            bases = await self.all()
            chosen = _chosen(bases, wanted, named)
        if chosen is None:
            field, value = ("base", wanted) if wanted else (_BASE_FIELD, named)
            raise _unknown(field, value, bases) if bases else _no_base()
        return await self._with_geometry(chosen), _name_warnings(chosen, named)

    async def _with_geometry(self, summary: BaseRecord) -> BaseRecord:
        """A base with its modules, which are read once for each of its generations."""
        known = self._known.get(summary.base_id)
        if known is None or _without_modules(known) != _without_modules(summary):
            known = await self.get(summary.base_id)
            if known is None:
                raise DataLoss(f"base {summary.base_id!r} is in the index but not in the store")
            self._known[summary.base_id] = known
        return known

    async def _check_no_adapter(self, base_id: str) -> None:
        tenant, slash, name = base_id.partition("/")
        if not slash:
            tenant, name = "default", base_id
        prefix = layout.versions_folder(tenant, name.lower())
        if "/" in name or prefix != prefix.lower() or "//" in prefix:
            return
        async for _ in self._store.list_objects(prefix):
            raise AlreadyExists(
                f"{base_id!r} is the name of an adapter; serve the base under another id"
            )


def _without_modules(base: BaseRecord) -> BaseRecord:
    return dataclasses.replace(base, geometry=dataclasses.replace(base.geometry, modules=()))


def _chosen(bases: list[BaseRecord], wanted: str, named: str) -> BaseRecord | None:
    """As `choose` describes it; None if none of the bases fits."""
    if wanted:
        return _by_name(bases, wanted)
    chosen = _by_name(bases, named) or _by_name(bases, _id_of(named)) or _original_of(bases, named)
    return bases[0] if chosen is None and len(bases) == 1 else chosen


def _by_name(bases: list[BaseRecord], name: str) -> BaseRecord | None:
    for base in bases:
        if name and name == base.base_id:
            return base
    found = [base for base in bases if name and name in base.aliases]
    return found[0] if len(found) == 1 else None


def _id_of(named: str) -> str:
    """PEFT writes the folder that a base was loaded from; bases in folders are called by its last
    name. What may be a hub id stays."""
    is_path = named.startswith(("/", "./", "../", "~")) or named.count("/") > 1
    return named.rstrip("/").rpartition("/")[2] if is_path else named


def _original_of(bases: list[BaseRecord], named: str) -> BaseRecord | None:
    """The only base that `named` is a copy of, by its name."""
    found = [base for base in bases if is_copy(named, (base.base_id, *base.aliases))]
    return found[0] if len(found) == 1 else None


def _no_base() -> Unavailable:
    return Unavailable(
        "no base is registered yet: start a worker and a gateway, or run 'registry base add'",
        reason="NO_BASE",
        retry_after_s=2.0,
    )


def _unknown(field: str, value: str, bases: list[BaseRecord]) -> InvalidAdapter:
    known = ", ".join(repr(base.base_id) for base in bases)
    description = f"is not registered; registered bases: {known}; choose one with --base"
    return InvalidAdapter.field(field, value, description)


def _name_warnings(base: BaseRecord, named: str) -> list[Violation]:
    if not named or {named, _id_of(named)} & {base.base_id, *base.aliases}:
        return []
    if _original_of([base], named) is not None:
        description = (
            f"is by its name a quantised or repacked copy of base {base.base_id!r}, which the "
            "adapter will run on"
        )
    else:
        description = (
            f"names another model than base {base.base_id!r}, whose tensor shapes it fits; make "
            "sure that it was trained on it"
        )
    return [Violation.of(_BASE_FIELD, named, description)]
