"""When this gateway is ready: once an upload followed by a request would work; then until
it drains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class Readiness:
    """Latches: a gateway that was ready answers 503 and 429 per request instead."""

    def __init__(self, first_missing: Callable[[], str]) -> None:
        """`first_missing()` says what is not there yet, "" when nothing."""
        self._first_missing = first_missing
        self._was_ready = False
        self._is_draining = False

    def missing(self) -> str:
        """What is missing; "" when ready."""
        if self._is_draining:
            return "draining"
        return "" if self._was_ready else self._first_missing()

    def end(self) -> None:
        """The gateway drains: never ready again."""
        self._is_draining = True

    async def wait(self) -> None:
        """Return when ready."""
        while self._first_missing():
            await asyncio.sleep(_POLL_S)
        self._was_ready = True
        logger.info("ready")
