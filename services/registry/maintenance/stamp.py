"""The layout number of a store, written once, so that an older build never misreads a newer one."""

from __future__ import annotations

import json

from loraplex.errors import LoraplexError
from services.common.objects import ObjectMissing, ObjectStore, PreconditionFailed


class WrongLayout(LoraplexError):
    """The store was written by a build with another layout."""

    reason = "WRONG_LAYOUT"


async def stamp(store: ObjectStore, key: str, number: int) -> None:
    """Write the number where none is; refuse a store that has another one.

    Raises:
        WrongLayout: naming both numbers.
    """
    try:
        found = json.loads((await store.get(key)).data)
    except ObjectMissing:
        try:
            await store.put_if_absent(key, json.dumps({"layout": number}).encode())
        except PreconditionFailed:
            await stamp(store, key, number)
        return
    except ValueError:
        found = None
    layout = found.get("layout") if isinstance(found, dict) else None
    if layout != number:
        raise WrongLayout(
            f"{store.url} has layout {layout!r} and this build knows {number}; "
            "use the build that wrote it, or another store"
        )
