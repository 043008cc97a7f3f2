"""Selects the version of an adapter that a reference means. Pure."""

from __future__ import annotations

from collections.abc import Collection

from loraplex.errors import InvalidRequest
from loraplex.refs import Ref, split_choice
from loraplex_services.registry.index.found import Found
from loraplex_services.registry.records import VersionRecord


def selector(ref: Ref) -> tuple[str, str]:
    """The kind and the text of what a reference names, as the index looks it up."""
    if ref.digest is not None:
        return "digest", ref.digest
    if ref.version is not None:
        return "version", str(ref.version)
    return "tag", ref.tag or "latest"


def selected(
    found: Found, ref: Ref, split_key: str, base_ids: Collection[str]
) -> VersionRecord | None:
    """The version that a reference means; None if it is not among those that were found."""
    number = ref.version
    if ref.tag is not None:
        tag = next((tag for tag in found.tags if tag.tag == ref.tag), None)
        is_live = tag is not None and bool(tag.targets)
        number = split_choice(tag.targets, split_key).version if tag and is_live else 0
    if ref.digest is not None:
        same = _of_content(found, ref.digest)
        same = [each for each in same if each.base_id in base_ids] or same
        return next((each for each in reversed(same) if each.base_id == same[0].base_id), None)
    live = (record for record in found.versions if not record.deleted)
    return next((record for record in live if record.version == number), None)


def _of_content(found: Found, digest: str) -> list[VersionRecord]:
    return [each for each in found.versions if not each.deleted and each.digest == digest]


def check_one_base(found: Found, ref: Ref) -> None:
    """Raises InvalidRequest if the content that a digest names is there for several bases."""
    same = _of_content(found, ref.digest or "")
    newest = {record.base_id: record.version for record in same}
    if len(newest) > 1:
        shown = ", ".join(f"v{number} for {base_id}" for base_id, number in newest.items())
        raise InvalidRequest.field(
            "ref",
            str(ref),
            f"the same content was published for several bases ({shown}); name a version",
            reason="AMBIGUOUS_DIGEST",
        )
