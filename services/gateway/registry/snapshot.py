"""The gateway's copy of the registry's versions and tags, and the resolution of references in it.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from loraplex.api.registry import Tag
from loraplex.refs import LATEST, Ref, split_choice
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.gateway.request import ServedContent

Adapter = tuple[str, str]
"""(tenant, name in lower case)."""
_MAX_CHANGES = 4096
"""Last changes that are remembered for look-ups that began before them."""


@dataclass(frozen=True, slots=True)
class Version(ServedContent):
    """One immutable upload: the part that serving needs."""

    tenant: str
    name: str
    """The name as it was first published."""
    number: int
    digest: str
    base_id: str
    base_fingerprint: str = ""
    """Fingerprint of the geometry that it was checked against; "" = unknown."""
    created_unix_s: float = 0.0
    deleted: bool = False
    is_public: bool = False
    shared_with: frozenset[str] = frozenset()
    labels: tuple[tuple[str, str], ...] = ()
    """The first labels of the version and of its adapter, and the beginnings of their values. Those
    of the adapter take precedence."""

    @property
    def label(self) -> str:
        """tenant/name:vN."""
        return f"{self.tenant}/{self.name}:v{self.number}"

    def visible_to(self, viewer: str | None) -> bool:
        """True if a tenant may run it; None is the operator, who may run everything."""
        if viewer is None or viewer == self.tenant:
            return True
        return self.is_public or viewer in self.shared_with


@dataclass(frozen=True, slots=True)
class Listing:
    """The versions and tags of an adapter that a tenant may run."""

    tenant: str
    name: str
    versions: tuple[Version, ...]
    """Versions, newest first."""
    tags: tuple[Tag, ...]


@dataclass(slots=True)
class _Entry:
    """Everything under one name."""

    versions: dict[int, Version] = field(default_factory=dict)
    tags: dict[str, Tag] = field(default_factory=dict)
    recipients: frozenset[str] = frozenset()
    """Whom the adapter is shared with: one object for thousands of versions, with up to 1,000
    names."""


class RegistrySnapshot:
    """A snapshot that is kept up to date by `put_version` and `put_tag`."""

    def __init__(self) -> None:
        self._entries: dict[Adapter, _Entry] = {}
        self._by_owner: dict[str, set[Adapter]] = {}
        """Adapters of each tenant."""
        self._for_others: set[Adapter] = set()
        """Adapters with a version that is or was public or shared."""
        self.pending: dict[tuple[str, str, str], Tag] = {}
        """Tags with a staged move, by tenant, name in lower case and tag."""
        self.num_changes = 0
        """How often a version was put."""
        self._changed: LruCache[tuple[Adapter, int], int] = LruCache(_MAX_CHANGES)
        """`num_changes` after the last change of a version."""

    def put_version(self, version: Version) -> None:
        """Record a version, or forget one that is deleted: updates may delete thousands."""
        self.num_changes += 1
        self._changed.put(_key(version), self.num_changes)
        self._record(version)

    def put_found(self, version: Version, tags: Iterable[Tag], began: int) -> None:
        """Record the answer of a look-up, unless it may be older than what is known.

        The registry may have answered before a version was deleted or made private, and its answer
        may arrive after the change.

        Args:
            began: `num_changes` when the look-up began.
        """
        is_newest = (self._changed.get(_key(version)) or 0) <= began
        if is_newest and self.num_changes - began <= _MAX_CHANGES:
            self._record(version)
        if self._entries.get((version.tenant, version.name.lower()), _Entry()).versions:
            for tag in tags:
                self.put_tag(tag)

    def _record(self, version: Version) -> None:
        entry = self._entry(version.tenant, version.name)
        if version.deleted:
            entry.versions.pop(version.number, None)
            self._forget_if_gone(version.tenant, version.name, entry)
            return
        if version.shared_with:
            if version.shared_with != entry.recipients:
                entry.recipients = version.shared_with
            version = replace(version, shared_with=entry.recipients)
        entry.versions[version.number] = version
        if version.is_public or version.shared_with:
            self._for_others.add((version.tenant, version.name.lower()))

    def put_tag(self, tag: Tag) -> None:
        """Record a tag's move unless a later one is known."""
        entry = self._entry(tag.tenant, tag.name)
        tags = entry.tags
        known = tags.get(tag.tag)
        if known is None or not tag.is_older_than(known):
            tags[tag.tag] = tag
            key = (tag.tenant, tag.name.lower(), tag.tag)
            if tag.pending:
                self.pending[key] = tag
            else:
                self.pending.pop(key, None)
        if not tag.targets:
            self._forget_if_gone(tag.tenant, tag.name, entry)

    def _forget_if_gone(self, tenant: str, name: str, entry: _Entry) -> None:
        """Drop an adapter without any version or tag: there may be one for each request."""
        tags = entry.tags.values()
        if not entry.versions and not any(tag.targets or tag.pending for tag in tags):
            key = (tenant, name.lower())
            del self._entries[key]
            self._for_others.discard(key)
            self._by_owner[tenant].discard(key)

    def version(self, tenant: str, name: str, number: int) -> Version | None:
        """One version that is not deleted."""
        return self.find(Ref(tenant, name.lower(), version=number), "")

    def find(
        self, ref: Ref, split_key: str, base_ids: Collection[str] = frozenset()
    ) -> Version | None:
        """The version that a reference means; None if the snapshot lacks it. Checks no access.

        Args:
            base_ids: bases that a digest may be for; empty = any.
        """
        entry = self._entries.get((ref.tenant, ref.name))
        if entry is None:
            return None
        if ref.digest is not None:
            return _of_digest(entry, ref.digest, base_ids)
        return entry.versions.get(self._number(entry, ref, split_key))

    def latest(self, tenant: str) -> Iterator[Version]:
        """The latest version of each adapter that a tenant may run, by tenant and name."""
        for owner, name in self.perhaps_visible(tenant):
            entry = self._entries[owner, name]
            version = self.find(Ref(owner, name, tag=LATEST), "") or _newest(entry)
            if version is not None and version.visible_to(tenant):
                yield version

    def listing(self, owner: str, name: str, viewer: str | None) -> Listing | None:
        """One adapter, if it exists and the viewer may run it, as in `Version.visible_to`."""
        entry = self._entries.get((owner, name), _Entry())
        visible = (version for version in entry.versions.values() if version.visible_to(viewer))
        versions = sorted(visible, key=lambda version: -version.number)
        if not versions:
            return None
        tags = sorted(entry.tags.values(), key=lambda tag: tag.tag)
        return Listing(
            owner, versions[0].name, tuple(versions), tuple(tag for tag in tags if tag.targets)
        )

    def labels(self, viewer: str | None) -> dict[str, list[str]]:
        """tenant/name:vN of every digest that is not deleted, and that the viewer may run. The
        names of one digest are in the order of their publication, newest first."""
        found: dict[str, list[Version]] = {}
        for entry in self._entries.values():
            for version in entry.versions.values():
                if version.visible_to(viewer):
                    found.setdefault(version.digest, []).append(version)
        for versions in found.values():
            versions.sort(key=lambda version: (-version.created_unix_s, version.label))
        return {digest: [each.label for each in named] for digest, named in found.items()}

    @property
    def num_adapters(self) -> int:
        """Number of names with at least one version."""
        return sum(_newest(entry) is not None for entry in self._entries.values())

    def _entry(self, tenant: str, name: str) -> _Entry:
        key = (tenant, name.lower())
        self._by_owner.setdefault(tenant, set()).add(key)
        return self._entries.setdefault(key, _Entry())

    def perhaps_visible(self, tenant: str) -> list[Adapter]:
        """A tenant's own adapters, and all that other tenants may also use, in order. Takes no time
        for the private adapters of other tenants."""
        return sorted(self._by_owner.get(tenant, set()) | self._for_others)

    @staticmethod
    def _number(entry: _Entry, ref: Ref, split_key: str) -> int:
        """0 = nothing answers."""
        if ref.version is not None:
            return ref.version
        tag = entry.tags.get(ref.tag or LATEST)
        return (
            split_choice(tag.targets, split_key).version if tag is not None and tag.targets else 0
        )


def _key(version: Version) -> tuple[Adapter, int]:
    return (version.tenant, version.name.lower()), version.number


def _of_digest(entry: _Entry, digest: str, base_ids: Collection[str]) -> Version | None:
    """The newest version of some content. If the content was published for several of the allowed
    bases, the first of them counts: a later publication must not move a reference by digest to
    another base. None if there is no version for an allowed base yet."""
    found = [version for version in entry.versions.values() if version.digest == digest]
    usable = [version for version in found if not base_ids or version.base_id in base_ids]
    first = min(usable, key=_by_number, default=None)
    same_base = (each for each in usable if first is not None and each.base_id == first.base_id)
    return max(same_base, key=_by_number, default=None)


def _by_number(version: Version) -> int:
    return version.number


def _newest(entry: _Entry) -> Version | None:
    """An adapter uploaded with --no-latest is listed by its newest version."""
    return max(entry.versions.values(), key=lambda version: version.number, default=None)
