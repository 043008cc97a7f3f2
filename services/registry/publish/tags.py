"""Moves tags by compare-and-set in the objects, with a record of their last moves."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Sequence, Set

from loraplex.api.registry import TagTarget
from loraplex.errors import AdapterNotFound, Conflict, InvalidRequest, NotFound, ResourceExhausted
from loraplex.refs import LATEST, is_digest
from loraplex_services.common import documents
from loraplex_services.common.documents import Seen
from loraplex_services.common.limits import MAX_TAGS_PER_ADAPTER
from loraplex_services.common.objects import After, ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.access.audit import Audit
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.items import scope_of
from loraplex_services.registry.index.versions import Versions
from loraplex_services.registry.publish.tag_rules import TagRules
from loraplex_services.registry.records import MAX_TAG_MOVES, Move, TagRecord, now_s

MAX_SIDES = 16
_ROLLBACK = "rollback-"
"""Begins the ids of moves that undid other moves."""
NONE = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class TagAddress:
    """The address of one tag."""

    tenant: str
    name: str
    """In lower case."""
    tag: str
    shown_name: str = ""
    """The name as people see it; "" = that of the tag if there is one, else in lower case."""

    @property
    def key(self) -> str:
        return layout.tag(self.tenant, self.name, self.tag)

    @property
    def scope(self) -> str:
        return scope_of(self.tenant, self.name)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.shown_name or self.name}:{self.tag}"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tags:
    """Moves tags."""

    store: ObjectStore
    catalog: Catalog
    versions: Versions
    audit: Audit
    rules: TagRules

    async def address(self, tenant: str, name: str, tag: str) -> TagAddress:
        """The address of a tag, with the name of its adapter as it was first published."""
        return TagAddress(tenant, name, tag, await self.versions.shown_name(tenant, name))

    async def read(self, address: TagAddress) -> TagRecord | None:
        """A tag from the objects; deleted ones too."""
        return await documents.read(self.store, address.key, TagRecord)

    async def look(self, address: TagAddress) -> Seen[TagRecord]:
        """A tag from the objects, for a `move` that is to follow."""
        return await documents.look(self.store, address.key, TagRecord)

    async def check_new(self, tenant: str, name: str, tags: Sequence[str]) -> None:
        """Check that an adapter may have these tags. `latest`, and those that it has or had, are
        always allowed.

        Calls that add tags at the same time may exceed the limit by what they add: the index
        follows the objects, and only the objects could refuse one of two writers.

        Raises: ResourceExhausted.
        """
        named = [tag for tag in dict.fromkeys(tags) if tag != LATEST]
        if not named:
            return
        num_tags = await self.catalog.num_tags(scope_of(tenant, name))
        if num_tags + len(named) <= MAX_TAGS_PER_ADAPTER:
            return
        addresses = [TagAddress(tenant, name, tag) for tag in named]
        found = await asyncio.gather(*map(self.read, addresses))
        new = [tag for tag, record in zip(named, found, strict=True) if record is None]
        if new and num_tags + len(new) > MAX_TAGS_PER_ADAPTER:
            raise ResourceExhausted.field(
                "tags",
                " ".join(new),
                f"{tenant}/{name} has {num_tags} tags with the deleted ones, and an adapter has at "
                f"most {MAX_TAGS_PER_ADAPTER}; move one of these, or name versions by number",
                reason="TOO_MANY_TAGS",
            )

    async def move(
        self,
        address: TagAddress,
        choose: Callable[[TagRecord | None], Sequence[TagTarget] | None],
        mover: str,
        move_id: str,
        *,
        durable: bool = True,
        seen: Seen[TagRecord] | None = None,
        after: After = None,
    ) -> TagRecord | None:
        """Point a tag at the result of `choose(current)` (None = leave it), once per `move_id`.

        Changes the object only: the caller updates the index. Returns the resulting tag. `durable`,
        `seen` and `after` as in `documents.change`.
        """

        def step(current: TagRecord | None) -> TagRecord | None:
            if current is not None and any(move.move_id == move_id for move in current.moves):
                return None
            targets = choose(current)
            if targets is None or (current is not None and tuple(targets) == current.targets):
                return None
            return moved(address, current, tuple(targets), mover, move_id)

        return await documents.change(
            self.store, address.key, TagRecord, step, durable=durable, seen=seen, after=after
        )

    async def set(
        self,
        address: TagAddress,
        targets: Sequence[TagTarget],
        expect: str | None,
        mover: str,
        reason: str = "",
    ) -> TagRecord:
        """Point a tag at versions; without targets it is deleted.

        Args:
            reason: recorded in the audit log, also if the tag points there already.

        Raises:
            Conflict: the tag differs from `expect` (a digest, or "none").
            AdapterNotFound: a target does not exist, or there is no tag to delete.
        """
        wanted = [await self._resolved(address, target) for target in targets]

        def choose(current: TagRecord | None) -> Sequence[TagTarget]:
            check_expected(address, current, expect)
            if not wanted and (current is None or not current.targets):
                raise AdapterNotFound(str(address))
            return wanted

        return await self._move_and_index(
            address, choose, mover, "tag.set" if wanted else "tag.delete", reason
        )

    async def rollback(
        self,
        address: TagAddress,
        version: int,
        expect: str | None,
        mover: str,
        reason: str = "",
    ) -> TagRecord:
        """Move a tag back to its previous targets, or to `version` if that is not 0.

        A rollback undoes a move, so that the next one goes further back. Skips targets with a
        version that was deleted since, or that by now breaks a rule of its tenant.
        """
        target = await self._resolved(address, TagTarget(version, "")) if version else None
        found = await self.versions.of(address.tenant, address.name)
        versions = [version for version in found if not version.deleted]
        barred = await self.rules.barred(address.tenant, versions)
        live = {version.version for version in versions} - barred

        def choose(current: TagRecord | None) -> Sequence[TagTarget]:
            check_expected(address, current, expect)
            return [target] if target is not None else _previous(address, current, live)

        return await self._move_and_index(address, choose, mover, "tag.rollback", reason)

    async def _move_and_index(
        self,
        address: TagAddress,
        choose: Callable[[TagRecord | None], Sequence[TagTarget]],
        mover: str,
        action: str,
        reason: str,
    ) -> TagRecord:
        operation = await self.catalog.note_pending(address.scope)
        try:
            kind = _ROLLBACK if action == "tag.rollback" else ""
            record = await self.move(address, choose, mover, kind + secrets.token_hex(8))
        except Conflict:
            # The refused caller has seen the newer tag, so later readers must see it too.
            seen = await self.read(address)
            items = await self.versions.items_of_tag(seen) if seen else []
            await self.catalog.apply(address.scope, items, operation=operation)
            raise
        assert record is not None, "choose returned targets"
        record = await self._without_deleted_targets(address, record, mover)
        await self.note(address, record, action, mover, operation, reason)
        return record

    async def note(
        self,
        address: TagAddress,
        record: TagRecord,
        action: str,
        actor: str,
        operation: str,
        reason: str = "",
    ) -> None:
        """Record a change of a tag in the audit log and the index.

        Args:
            operation: what `Catalog.note_pending` returned before the change.
            reason: what the caller gave; "" = none.
        """
        targets = record.pending or record.targets
        details = {"targets": describe(targets), "generation": str(record.generation)}
        if reason:
            details["reason"] = reason
        digest = targets[0].digest if targets else ""
        await self.audit.write(
            actor, address.tenant, action, str(address), digest=digest, details=details
        )
        items = await self.versions.items_of_tag(record)
        await self.catalog.apply(address.scope, items, operation=operation)

    async def _without_deleted_targets(
        self, address: TagAddress, record: TagRecord, mover: str
    ) -> TagRecord:
        """Remove targets that were deleted while the tag moved.

        A deletion checks the tags after writing tombstones, and a move checks the versions after
        moving, so that one of them notices.
        """
        versions = [
            await self.versions.read(address.tenant, address.name, target.version)
            for target in record.targets
        ]
        if all(version is not None and not version.deleted for version in versions):
            return record

        def choose(current: TagRecord | None) -> Sequence[TagTarget] | None:
            return () if current is not None and current.targets == record.targets else None

        settled = await self.move(address, choose, mover, secrets.token_hex(8))
        assert settled is not None, "tags are never removed"
        return settled

    async def resolved(
        self, address: TagAddress, targets: Sequence[TagTarget]
    ) -> tuple[TagTarget, ...]:
        """Targets with version and digest. Raises AdapterNotFound if one is not live."""
        return tuple([await self._resolved(address, target) for target in targets])

    async def _resolved(self, address: TagAddress, target: TagTarget) -> TagTarget:
        """A target with version and digest, checked to be live and to follow the rules of its
        tenant."""
        if target.weight < 1:
            raise InvalidRequest.field("targets.weight", target.weight, "must be at least 1")
        record = await self.versions.read(address.tenant, address.name, target.version)
        if record is None or record.deleted:
            version = dataclasses.replace(address, tag=f"v{target.version}")
            raise AdapterNotFound(str(version))
        if target.digest not in ("", record.digest):
            description = f"v{record.version} has the digest {record.digest}; name one of the two"
            raise InvalidRequest.field("targets.digest", target.digest, description)
        await self.rules.check(record)
        return TagTarget(record.version, record.digest, target.weight)


def parse_expect(text: str) -> str:
    """Return what a tag shall point at before a move, if it can be that at all.

    Raises:
        InvalidRequest: it is neither a digest nor "none".
    """
    if text != NONE and not is_digest(text):
        raise InvalidRequest.field(
            "expect", text, "must be 'none' or a digest: 'sha256:' and 64 lower-case hex characters"
        )
    return text


def check_expected(address: TagAddress, current: TagRecord | None, expect: str | None) -> None:
    """Raises Conflict unless the tag is what the caller last saw."""
    if expect is None:
        return
    live = current.targets if current is not None else ()
    matches = not live if expect == NONE else len(live) == 1 and live[0].digest == expect
    if not matches:
        found = describe(live) if live else NONE
        raise Conflict(f"{address} is {found}, expected {expect}; read it again, then decide")


def describe(targets: Sequence[TagTarget]) -> str:
    """A description such as `v3=90 v4=10`, or a digest if the tag is not split."""
    if len(targets) == 1:
        return f"v{targets[0].version} {targets[0].digest}"
    return " ".join(f"v{target.version}={target.weight}" for target in targets) or NONE


def _previous(
    address: TagAddress, current: TagRecord | None, live: Set[int]
) -> Sequence[TagTarget]:
    """The last targets before the present ones whose versions are all `live`."""
    if current is None:
        raise AdapterNotFound(str(address))
    for targets in reversed(_not_undone(current)):
        wanted = {target.version for target in targets}
        if wanted and wanted <= live and targets != current.targets:
            return targets
    command = "registry rollback {} {} --to vN".format(*str(address).split(":"))
    raise NotFound(f"{address} has no earlier target to go back to; name a version: {command}")


def _not_undone(current: TagRecord) -> list[tuple[TagTarget, ...]]:
    """Where a tag has pointed, oldest first, without the moves that rollbacks undid."""
    past: list[tuple[TagTarget, ...]] = []
    for move in current.moves:
        if move.move_id.startswith(_ROLLBACK) and move.targets in past:
            while past[-1] != move.targets:
                past.pop()
        else:
            past.append(move.targets)
    return past


def moved(
    address: TagAddress,
    current: TagRecord | None,
    targets: tuple[TagTarget, ...],
    mover: str,
    move_id: str,
) -> TagRecord:
    generation = current.generation + 1 if current is not None else 1
    time_s = now_s()
    move = Move(generation, targets, time_s, mover, move_id)
    moves = (*(current.moves if current is not None else ()), move)[-MAX_TAG_MOVES:]
    # An address may lack the spelling: the index forgets the first version of an ephemeral adapter.
    known = current.spelling if current is not None else ""
    shown = known or address.shown_name or address.name
    # A direct move cancels a staged one: the last request wins.
    return TagRecord(
        address.tenant,
        address.name,
        address.tag,
        targets,
        generation,
        time_s,
        moves,
        spelling="" if shown == address.name else shown,
    )
