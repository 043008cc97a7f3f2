"""Turns errors of the disk into those of an object store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from loraplex_services.common.objects.store import ObjectStoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *args: object) -> T:
    """The result of work with files. Raises: ObjectStoreError."""
    with as_store_error():
        return await asyncio.to_thread(work, *args)


@contextlib.contextmanager
def as_store_error() -> Iterator[None]:
    """Clients read the error, so the path is only logged."""
    try:
        yield
    except OSError as error:
        facts = {"path": error.filename, "problem": error.strerror}
        logger.warning("object store failed", extra=facts)
        raise ObjectStoreError(f"object store failed: {error.strerror}") from error
