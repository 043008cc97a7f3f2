"""The answers of the index about adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loraplex_services.common.documents import decode
from loraplex_services.registry.index.redis_calls import text
from loraplex_services.registry.records import AdapterRecord, TagRecord, VersionRecord


@dataclass(frozen=True, slots=True)
class Found:
    """The data of the index about one adapter."""

    tags: tuple[TagRecord, ...]
    """Existing tags, ordered by name."""
    versions: tuple[VersionRecord, ...]
    """Ordered by number."""
    adapter: AdapterRecord | None
    has_more: bool = False
    """Whether other versions have, or had, the requested digest."""

    @property
    def num_documents(self) -> int:
        return len(self.tags) + len(self.versions)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a list continues: after this version of this scope, or after the whole scope if it
    names no version."""

    scope: str = ""
    version: int = 0

    @classmethod
    def at(cls, version: VersionRecord) -> Cursor:
        """After a version."""
        return cls(f"{version.tenant}/{version.name}", version.version)

    @property
    def bound(self) -> str:
        """Where ZRANGEBYLEX begins."""
        return f"{'[' if self.version else '('}{self.scope}" if self.scope else "-"


@dataclass(frozen=True, slots=True)
class IndexPage:
    """Some adapters, in order."""

    epoch: str
    adapters: list[tuple[str, Found]]
    """Adapters with their scopes. The last one may lack the versions after `end`."""
    end: Cursor | None
    """Where the next page begins; None if there is none."""


def found_of(tags: list[bytes], versions: list[bytes], adapter: bytes) -> Found:
    """An adapter, from documents of the index."""
    records = (record_of(TagRecord, value) for value in tags)
    return Found(
        tuple(sorted((tag for tag in records if tag.is_shown), key=lambda tag: tag.tag)),
        tuple(sorted((record_of(VersionRecord, v) for v in versions), key=lambda v: v.version)),
        record_of(AdapterRecord, adapter) if adapter else None,
    )


def page_of(epoch: str, adapters: list[list[Any]], is_last: bool) -> IndexPage:
    """A page, from the answer of `page.lua`."""
    found = [(text(scope), found_of(tags, versions, adapter))
             for scope, adapter, tags, versions, _ in adapters]  # fmt: skip
    end = None if is_last else Cursor(found[-1][0], int(adapters[-1][4]))
    return IndexPage(epoch, found, end)


def record_of(cls: Any, value: bytes) -> Any:
    """A record, from a document of the index, `<generation> <JSON>`."""
    return decode(cls, value.split(b" ", 1)[1])
