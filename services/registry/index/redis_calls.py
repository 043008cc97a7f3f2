"""Wraps calls to Redis: the prefix of keys, typed errors, and text instead of bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from loraplex.errors import Unavailable
from loraplex_services.common.redis_url import is_closed_transport

PREFIX = "loraplex:"
"""The beginning of every key."""
_STATES = ("BUSY", "MISCONF", "NOREPLICAS")
"""First words of errors without a type in redis-py that concern the server, not the command."""
_FULL = "its memory is full; raise its maxmemory"
_CLUSTER = (
    "it is a node of a cluster that does not hold all keys; use a server without cluster mode, "
    "or Sentinel"
)
_AWAY = "it does not answer; try again (the registry's log says why)"


class CatalogDown(Unavailable):
    """Redis cannot be reached, or holds no index yet. The message is for callers and names no
    address."""

    reason = "INDEX_UNAVAILABLE"

    @property
    def for_log(self) -> str:
        """The message, and what Redis or the connection to it said."""
        return f"{self.message} ({self.__cause__})" if self.__cause__ else self.message


class NoIndex(CatalogDown):
    """Redis is reachable, but holds no index, or one that is older than what was read before."""


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Raises CatalogDown if Redis, or the connection to it, fails."""
    try:
        yield
    except (RedisError, OSError) as error:
        if type(error) is ResponseError and not str(error).startswith(_STATES):
            raise  # A command that no server accepts is a bug of ours.
        problem = str(error)
        if isinstance(error, OutOfMemoryError):
            problem = _FULL
        elif isinstance(error, (AskError, ClusterDownError)):  # MovedError is an AskError
            problem = _CLUSTER
        elif isinstance(error, (RedisConnectionError, RedisTimeoutError, OSError)):
            problem = _AWAY
        raise CatalogDown(f"metadata server: {problem}", retry_after_s=1.0) from error
    except RuntimeError as error:
        if not is_closed_transport(error):
            raise
        raise CatalogDown(f"metadata server: {_AWAY}", retry_after_s=1.0) from error


async def wait(answer: Awaitable[Any] | Any) -> Any:
    """Await an answer: redis-py types hash commands as 'maybe awaitable'."""
    return await answer


def text(value: Any) -> str:
    """An answer as text."""
    return value.decode() if isinstance(value, bytes) else str(value)
