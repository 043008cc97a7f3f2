"""Composes files and batch jobs: their endpoints, the runner of batch jobs, and the sweeper."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.routing import Route
from starlette.types import ASGIApp

from loraplex_services.common.callers import Caller
from loraplex_services.gateway.batches.book import BatchBook
from loraplex_services.gateway.batches.files import Files
from loraplex_services.gateway.batches.pace import Pace
from loraplex_services.gateway.batches.runner import BatchRunner
from loraplex_services.gateway.batches.sending import RunContext
from loraplex_services.gateway.batches.storage import Storage
from loraplex_services.gateway.batches.sweep import Sweeper
from loraplex_services.gateway.http.app import AppContext
from loraplex_services.gateway.http.batches import BatchEndpoints
from loraplex_services.gateway.http.files import FileEndpoints
from loraplex_services.gateway.http.in_process import InProcessEndpoints
from loraplex_services.gateway.pipeline.collected_bytes import CollectedBytes


class StoredWork:
    """The files and batch jobs of one gateway."""

    def __init__(
        self,
        objects_url: str,
        gateway_id: str,
        context: AppContext,
        app: Callable[[], ASGIApp],
        limit: Callable[[], int],
        collected: CollectedBytes,
        check_key: Callable[[str], Awaitable[Caller]] | None,
    ) -> None:
        """
        Args:
            app: the app that has `routes`, once it is made.
            limit: how many requests of batch jobs may run now.
            collected: counts answers that are not stored yet.
            check_key: the holder of the key with an id; None without keys.

        Raises: InvalidRequest if the URL's folder cannot be used.
        """
        self._storage = Storage(objects_url)
        files, book = Files(self._storage), BatchBook(self._storage)
        self._sweeper = Sweeper(self._storage)
        self._runner = BatchRunner(
            RunContext(
                gateway_id=gateway_id,
                storage=self._storage,
                files=files,
                book=book,
                endpoints=InProcessEndpoints(app),
                pace=Pace(limit),
                unread=collected.unread,
                check_key=check_key,
            )
        )
        self._files = FileEndpoints(context, files, book)
        self._batches = BatchEndpoints(context, files, book, self._runner.wake)

    def routes(self) -> list[Route]:
        return [*self._files.routes(), *self._batches.routes()]

    async def run(self) -> None:
        """Run batch jobs and sweep until cancelled."""
        await asyncio.gather(self._runner.run(), self._sweeper.run())

    async def drain(self) -> None:
        """Leave batch jobs to other gateways."""
        await self._runner.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._storage.close()
