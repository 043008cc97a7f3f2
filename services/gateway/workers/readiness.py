"""Decides whether a gateway is ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.05


class Readiness:
    """Readiness that latches: once ready, the gateway stays ready and refuses single requests
    instead."""

    def __init__(self, first_missing: Callable[[], str]) -> None:
        """`first_missing()` returns what the gateway still waits for; "" if nothing."""
        self._first_missing = first_missing
        self._was_ready = False
        self._is_draining = False

    def missing(self) -> str:
        """Why the gateway is not ready; "" if it is."""
        if self._is_draining:
            return "draining"
        if self._was_ready:
            return ""
        # Whoever sees it ready first latches it: a worker may be gone before the next poll.
        missing = self._first_missing()
        self._was_ready = not missing
        return missing

    def end(self) -> None:
        """Start draining: the gateway is never ready again."""
        self._is_draining = True

    async def wait(self) -> None:
        """Return when ready."""
        while self.missing():
            await asyncio.sleep(_READY_POLL_S)
        logger.info("ready")
