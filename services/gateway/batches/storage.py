"""Opens the object store for a gateway, which starts and serves without it."""

from __future__ import annotations

import asyncio

from loraplex_services.common.objects import ObjectStore, open_store
from loraplex_services.common.objects.probe import probe


class Storage:
    """The store behind `LORAPLEX_OBJECTS`."""

    def __init__(self, url: str) -> None:
        """Raises: InvalidRequest if the URL's folder cannot be used."""
        self._store = open_store(url)
        self._is_proved = False
        self._proving = asyncio.Lock()

    async def store(self) -> ObjectStore:
        """The store, once a check has shown that it gives the guarantees that batch jobs rely on.

        Raises: ObjectStoreError, UnsafeStore. A later call tries again.
        """
        async with self._proving:
            if not self._is_proved:
                await probe(self._store)
                self._is_proved = True
        return self._store

    async def close(self) -> None:
        """Close the connections."""
        await self._store.close()
