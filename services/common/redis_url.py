"""Makes clients of the metadata server from a URL: plain, TLS, Unix socket, or through Sentinel."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qsl, unquote

import redis.asyncio
from redis.asyncio.connection import ConnectionPool, SSLConnection
from redis.asyncio.sentinel import Sentinel, SentinelManagedSSLConnection
from redis.exceptions import ConnectionError as RedisGone
from redis.exceptions import ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimedOut

from loraplex.errors import InvalidRequest
from loraplex_services.common.settings import env

DEFAULT_SENTINEL_PORT = 26379
_CONNECT_TIMEOUT_S = 2.0
_TIMEOUT_S = 5.0
_HEALTH_CHECK_S = 15
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SENTINEL_OPTIONS = ("tls", "sentinel_password", *_TLS_FILES)
_FORMS = (
    "must be embedded, redis://HOST:PORT[/DB], rediss://... for TLS, unix:///path, or "
    "redis+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE[/DB]"
)


class BoundedRedis(redis.asyncio.Redis):
    """A client whose commands wait for one time-out in all. redis-py would try again after each
    time-out, with pauses, and check the health of an idle connection first. Pipelines are not
    affected."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Raises: RedisError; its TimeoutError after the time-out, its ConnectionError also where
        uvloop has another word for a connection that was reset."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except ReadOnlyError:
            # No primary any more: the address may lead to another one by now.
            await self.connection_pool.disconnect(inuse_connections=False)
            raise
        except RuntimeError as error:
            if not is_closed_transport(error):
                raise
            raise RedisGone(str(error)) from error
        except TimeoutError:
            raise RedisTimedOut(f"no answer within {_TIMEOUT_S:g} s") from None


class RenewedTls(SSLConnection):
    """A connection that reads its TLS files whenever it is opened. Pools keep and reopen their
    connections, and redis-py's would use what it read the first time."""

    async def connect(self) -> None:
        """Raises: RedisError."""
        if not self.is_connected:
            self.ssl_context.context = None
        await super().connect()  # type: ignore[no-untyped-call]


class RenewedSentinelTls(RenewedTls, SentinelManagedSSLConnection):
    """The same, to the primary that Sentinel names."""


def _renew_tls(pool: ConnectionPool) -> None:
    """Mutates: pool, if its connections have TLS."""
    renewed = {SSLConnection: RenewedTls, SentinelManagedSSLConnection: RenewedSentinelTls}
    pool.connection_class = renewed.get(pool.connection_class, pool.connection_class)


def is_closed_transport(error: RuntimeError) -> bool:
    """Whether an error of uvloop means that the peer closed a connection; asyncio raises
    ConnectionError."""
    return "the handler is closed" in str(error)


def connect_redis(url: str) -> redis.asyncio.Redis:
    """A client that speaks RESP2 and has short time-outs: a server that hangs must not hang us.

    Sentinel URLs take `?sentinel_password=...`; name and password before the '@' are those of the
    servers. `redis+sentinel` with `?tls=true` connects to both with TLS. With TLS both forms take
    redis-py's `ssl_ca_certs`, `ssl_certfile` and `ssl_keyfile`, paths of PEM files.

    Raises:
        InvalidRequest: naming LORAPLEX_METADATA, without showing passwords.
    """
    before, separator, rest = url.partition("://")
    scheme = before.lower() if separator else ""
    if scheme == "redis+sentinel":
        return _through_sentinel(rest)
    if scheme not in ("redis", "rediss", "unix"):
        raise InvalidRequest.field(env.METADATA.name, scheme, _FORMS)
    try:
        client = BoundedRedis.from_url(
            url,
            protocol=2,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            health_check_interval=_HEALTH_CHECK_S,
        )
        # Refuses options that it does not know.
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except ValueError:
        raise InvalidRequest.field(env.METADATA.name, scheme, _FORMS) from None
    except (TypeError, RedisError) as error:
        why = f"has an option in its query that cannot be used: {error}"
        raise InvalidRequest.field(env.METADATA.name, scheme, why) from None
    _renew_tls(client.connection_pool)
    return client


def _through_sentinel(address: str) -> redis.asyncio.Redis:
    """`address`: what follows `redis+sentinel://`.

    urlsplit is of no use here: recent versions of Python refuse an IPv6 address after another node.
    """
    nodes_and_path, _, query = address.partition("?")
    options = dict(parse_qsl(query))
    netloc, _, path = nodes_and_path.partition("/")
    credentials, _, hosts = netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    service, _, database = path.strip("/").partition("/")
    try:
        nodes = [_node(host) for host in hosts.split(",")]
        number = int(database or 0)
    except ValueError:
        nodes, number = [], 0
    if not nodes or not service:
        raise InvalidRequest.field(env.METADATA.name, "redis+sentinel", _FORMS)
    for name in options.keys() - set(_SENTINEL_OPTIONS):
        known = ", ".join(_SENTINEL_OPTIONS)
        why = f"has the unknown option {name} in its query; known are {known}"
        raise InvalidRequest.field(env.METADATA.name, "redis+sentinel", why)
    shared: dict[str, Any] = {
        "ssl": options.get("tls", "").lower() in ("1", "true", "yes"),
        **{name: options[name] for name in _TLS_FILES if name in options},
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "protocol": 2,
    }
    watched = {**shared, "password": options.get("sentinel_password")}
    sentinel = Sentinel(nodes, sentinel_kwargs=watched)  # type: ignore[no-untyped-call]
    client: redis.asyncio.Redis = sentinel.master_for(
        service,
        BoundedRedis,
        db=number,
        username=unquote(user) or None,
        password=unquote(password) or None,
        health_check_interval=_HEALTH_CHECK_S,
        **shared,
    )
    for each in (client, *sentinel.sentinels):
        _renew_tls(each.connection_pool)
    return client


def _node(text: str) -> tuple[str, int]:
    """HOST or HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(DEFAULT_SENTINEL_PORT)
    if not host:
        raise ValueError(text)
    return host.strip("[]"), int(port)
