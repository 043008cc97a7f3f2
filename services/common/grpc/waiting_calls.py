"""Bounds the calls that wait in gRPC's core.

The core keeps each call that arrives until Python takes it, also if its connection has closed, and
no option limits their number: `grpc.server.max_pending_requests` limits those of a transport that
is not in use yet. A call that waits takes about 15 KB. Clients without a key can open them ten
times faster than Python takes them.

While too many wait, the server therefore accepts no connections and closes those that have made no
call with a valid key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # grpcio-channelz reads it, too
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex_services.common.grpc.connections import Connections
from loraplex_services.common.limits import MAX_WAITING_CALLS
from loraplex_services.common.recent import Recent

logger = logging.getLogger(__name__)

COUNTED = ("grpc.enable_channelz", 1)
"""Lets the core count calls."""
_POLL_S = 0.05
_CLOSE_EVERY_S = 0.25
_MAX_PEERS = 10_000
_STAYS_CONNECTED = [("grpc.client_idle_timeout_ms", (1 << 31) - 1)]
"""Strangers may have taken all files that the process can open when the connection is needed."""
_NUM_FOR_ALL = 20
"""So many times as many calls may wait before the connections with a valid key are closed, too."""


class WaitingCalls:
    """Counts the calls of one server that wait, and closes connections if they are too many."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._never_taken = 0
        """Calls that had arrived and that Python will not take, because they are malformed."""
        self._with_key: Recent[str, bool] = Recent(_MAX_PEERS)
        self._probe = f"unix-abstract:loraplex-{os.getpid()}-{secrets.token_hex(8)}"
        self._server_id = 0

    def take(self) -> None:
        """Count a call that Python has taken."""
        self._num_taken += 1

    def trust(self, peer: str) -> None:
        """Note that a connection has made a call with a valid key, by gRPC's name of its peer."""
        name = unquote(peer)
        if not self._with_key.get(name):
            self._with_key.put(name, value=True)

    def watch(self, server: grpc.aio.Server) -> None:
        """Watch this server, the last one that was made. It must not have started."""
        if sys.platform == "linux":
            self._server_id = _newest_server()
            server.add_insecure_port(self._probe)

    async def bound(self, ports: Collection[int]) -> None:
        """Bound the calls that come through these ports until the task is cancelled. Only Linux has
        what this needs."""
        if not self._server_id or not ports:
            return
        connections = Connections(ports)
        try:
            async with grpc.aio.insecure_channel(self._probe, _STAYS_CONNECTED) as channel:
                await channel.channel_ready()
                stub: Any = health_pb2_grpc.HealthStub(channel)
                while True:
                    await asyncio.sleep(_POLL_S)
                    try:
                        if self._num_waiting() > MAX_WAITING_CALLS:
                            with connections.paused():
                                await self._wait_for_few(connections, stub.Check)
                    except (OSError, grpc.RpcError):
                        logger.exception("cannot bound the calls that wait")
        finally:
            connections.release()

    async def _wait_for_few(self, connections: Connections, check: Any) -> None:
        """Close connections until few calls wait.

        Calls are taken in the order in which they arrived. When a call of our own is answered, all
        that had arrived before it have been taken, or never will be.
        """
        num_closed, most = 0, 0
        while self._num_waiting() > MAX_WAITING_CALLS // 2:
            num_arrived = self._num_arrived()
            ours = asyncio.ensure_future(check(health_pb2.HealthCheckRequest()))
            while not (await asyncio.wait([ours], timeout=_CLOSE_EVERY_S if most else _POLL_S))[0]:
                num_waiting = self._num_waiting()
                most = max(most, num_waiting)
                keeps_any = num_waiting < _NUM_FOR_ALL * MAX_WAITING_CALLS
                num_closed += connections.close(self._with_key.get if keeps_any else _keep_none)
            ours.result()
            self._never_taken = num_arrived - self._num_taken
        if num_closed:
            logger.warning(
                "too many calls waited: connections without a valid key were closed",
                extra={"num_calls": most, "num_connections": num_closed},
            )

    def _num_waiting(self) -> int:
        return self._num_arrived() - self._num_taken - self._never_taken

    def _num_arrived(self) -> int:
        answer = json.loads(cygrpc.channelz_get_server(self._server_id))
        return int(answer["server"]["data"].get("callsStarted", 0))


def _keep_none(peer: str) -> bool:
    return False


def _newest_server() -> int:
    """The core's id of the server that was made last; ids grow."""
    newest, page = 0, dict[str, Any]()
    while not page.get("end"):
        page = json.loads(cygrpc.channelz_get_servers(newest + 1))
        newest = max([newest, *(int(each["ref"]["serverId"]) for each in page.get("server", ()))])
    return newest
