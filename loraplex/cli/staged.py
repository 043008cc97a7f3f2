"""Waits for staged moves: `--wait` returns when the tag has moved or cannot move."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex.api.registry import Tag, TagTarget
    from loraplex.client.registry_client import RegistryClient

_FIRST_POLL_S = 0.05
_MAX_POLL_S = 1.0


async def until_moved(
    client: RegistryClient, version_ref: str, tag_name: str, wanted: Mapping[int, int]
) -> Tag:
    """Wait until a tag points at `wanted` (version -> weight); the registry sets the time limit.

    Args:
        version_ref: a version of the adapter, as `tenant/name:vN`.

    Raises:
        Unavailable: the versions were not or cannot be loaded in time; the tag has not moved.
        Conflict: another caller moved the tag in the meantime.
    """
    import asyncio

    from loraplex.errors import Conflict, Unavailable

    poll_s = _FIRST_POLL_S
    if sys.stderr.isatty():
        print(
            f"waiting for {tag_name} to move; Ctrl-C stops waiting, not the move", file=sys.stderr
        )
    while True:
        tags = (await client.get(version_ref)).tags
        tag = next((tag for tag in tags if tag.tag == tag_name), None)
        if tag is not None and _weights(tag.targets) == wanted:
            return tag
        moved = f"{version_ref.partition(':')[0]}:{tag_name}"
        if tag is not None and not tag.pending and tag.pending_reason:
            problem = f"{moved} has not moved: {tag.pending_reason}"
            raise Unavailable(problem, reason="NOT_LOADED")
        if tag is None or _weights(tag.pending) != wanted:
            raise Conflict(
                f"another caller moved {moved} in the meantime; read it again, then decide"
            )
        await asyncio.sleep(poll_s)
        poll_s = min(2 * poll_s, _MAX_POLL_S)


def _weights(targets: Sequence[TagTarget]) -> dict[int, int]:
    return {target.version: target.weight for target in targets}
