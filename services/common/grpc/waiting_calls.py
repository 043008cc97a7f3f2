"""Bounds the calls that wait in gRPC's core.

The core keeps each call that arrives until Python takes it, also if its connection has closed, and
no option limits their number: `grpc.server.max_pending_requests` limits those of a transport that
is not in use yet. A call that waits takes about 15 KB. Clients without a key can open them ten
times faster than Python takes them.

While too many wait, the server therefore accepts no connections and closes those that have made no
call with a valid key.

The core is asked for its count only when the process has grown. Before version 1.85, grpcio never
frees the answer (grpc/grpc#43196): asked twenty times a second, a server grew by 30 MB in an hour.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import resource
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # grpcio-channelz reads it, too
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.allocation import return_free_memory
from loraplex_services.common.grpc.connections import Connections
from loraplex_services.common.limits import MAX_WAITING_CALLS
from loraplex_services.common.lru_cache import LruCache

logger = logging.getLogger(__name__)

COUNTED = ("grpc.enable_channelz", 1)
"""Lets the core count calls."""
_POLL_S = 0.05
_SHORT_POLL_S = 0.005
_GROWTH_BYTES = 4 << 20
"""About 280 calls."""
_MAX_UNCOUNTED_S = 60.0
"""After which the core is asked even without growth: calls may use memory that was free."""
_NUM_FEW = MAX_WAITING_CALLS // 8
_CLOSE_EVERY_S = 0.25
_MAX_PEERS = 10_000
_STAYS_CONNECTED = [("grpc.client_idle_timeout_ms", (1 << 31) - 1)]
"""Strangers may have taken all files that the process can open when the connection is needed."""
_NUM_WITH_KEY = 4
"""Number of times that only connections without a valid key are closed. If more and more calls wait
afterwards, all are."""


class WaitingCalls:
    """Counts the calls of one server that wait, and closes connections if they are too many."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._never_taken = 0
        """Calls that had arrived and that Python will not take, because they are malformed."""
        self._with_key: LruCache[str, bool] = LruCache(_MAX_PEERS)
        self._folder = ""
        """A private folder with the socket for the server's own calls. It is removed when this
        object is collected or the process ends, even after a failed start, unless the process is
        killed."""
        self._server_id = 0
        self._unread: deque[str] = deque()
        """Peers whose connections are to be closed."""

    def take(self) -> None:
        """Count a call that Python has taken."""
        self._num_taken += 1

    def trust(self, peer: str) -> None:
        """Note that a connection has made a call with a valid key, by gRPC's name of its peer."""
        name = unquote(peer)
        if name not in self._with_key:
            self._with_key.put(name, value=True)

    def close(self, peer: str) -> None:
        """Close the connection of a peer soon, by gRPC's name of it: its client does not read."""
        self._unread.append(unquote(peer))

    def watch(self, server: grpc.aio.Server) -> None:
        """Watch this server, the last one that was made. It must not have started. Only Linux has
        what this needs."""
        if sys.platform != "linux":
            return
        self._server_id = _newest_server()
        try:
            self._folder = tempfile.mkdtemp(prefix="loraplex-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            server.add_insecure_port(self._address)
        except (OSError, RuntimeError):
            self._server_id = 0
            logger.exception("waiting calls are not bounded, because TMPDIR takes no socket")

    @property
    def _address(self) -> str:
        return f"unix:{self._folder}/own"

    async def bound(self, ports: Collection[int]) -> None:
        """Bound the calls that come through these ports until the task is cancelled."""
        if not self._server_id:
            return
        async with grpc.aio.insecure_channel(self._address, _STAYS_CONNECTED) as channel:
            await channel.channel_ready()
            stub: Any = health_pb2_grpc.HealthStub(channel)
            loop, is_over = asyncio.get_running_loop(), threading.Event()

            def check() -> Future[None]:
                return asyncio.run_coroutine_threadsafe(_answered(stub), loop)

            watching = threading.Thread(
                target=self._keep_few,
                args=(Connections(ports), check, is_over),
                name="waiting-calls",
                daemon=True,
            )
            watching.start()
            try:
                await asyncio.Event().wait()
            finally:
                is_over.set()
                await asyncio.to_thread(watching.join)

    def _keep_few(
        self, connections: Connections, check: Callable[[], Future[None]], is_over: threading.Event
    ) -> None:
        """Close connections whenever too many calls wait. The event loop would be late for this: it
        takes calls meanwhile."""
        pause_s, growth = _POLL_S, _Growth()
        while not is_over.wait(pause_s):
            try:
                self._close_unread(connections)
                if not growth.calls_for_count():
                    continue
                num_waiting = self._num_waiting()
                if num_waiting > MAX_WAITING_CALLS:
                    with connections.paused():
                        self._wait_for_few(connections, check, is_over)
                    return_free_memory()
                pause_s = _SHORT_POLL_S if num_waiting > _NUM_FEW else _POLL_S
            except (OSError, RuntimeError, ValueError, CancelledError, grpc.RpcError):
                if not is_over.is_set():
                    logger.exception("bounding the waiting calls failed")
        connections.release()

    def _close_unread(self, connections: Connections) -> None:
        peers = {self._unread.popleft() for _ in range(len(self._unread))}
        if peers:
            connections.close(lambda peer: peer not in peers)

    def _wait_for_few(
        self, connections: Connections, check: Callable[[], Future[None]], is_over: threading.Event
    ) -> None:
        """Close connections until few calls wait.

        Calls are taken in the order in which they arrived. When a call of our own is answered, all
        that had arrived before it have been taken, or never will be.
        """
        num_closed, seen = 0, [0]
        while self._num_waiting() > MAX_WAITING_CALLS // 2:
            num_arrived = self._num_arrived()
            ours = check()
            while not wait([ours], _CLOSE_EVERY_S if num_closed else _SHORT_POLL_S).done:
                if is_over.is_set():
                    return
                seen.append(self._num_waiting())
                grows = len(seen) > _NUM_WITH_KEY and seen[-1] > seen[-2]
                num_closed += connections.close(
                    _keep_none if grows else self._with_key.__contains__
                )
            ours.result()
            self._never_taken = num_arrived - self._num_taken
        if num_closed:
            logger.warning(
                "too many calls waited: connections without a valid key were closed",
                extra={"num_calls": max(seen), "num_connections": num_closed},
            )

    def _num_waiting(self) -> int:
        return self._num_arrived() - self._num_taken - self._never_taken

    def _num_arrived(self) -> int:
        answer = json.loads(cygrpc.channelz_get_server(self._server_id))
        return int(answer["server"]["data"].get("callsStarted", 0))


class _Growth:
    """Tells when calls may be waiting."""

    def __init__(self) -> None:
        self._from_bytes = 0
        self._counted_s = -math.inf

    def calls_for_count(self) -> bool:
        """Whether the process has grown since this was last true, or that was long ago."""
        resident_bytes, now_s = _resident_bytes(), time.monotonic()
        self._from_bytes = min(self._from_bytes, resident_bytes)
        has_grown = resident_bytes - self._from_bytes >= _GROWTH_BYTES
        if not has_grown and now_s - self._counted_s < _MAX_UNCOUNTED_S:
            return False
        self._from_bytes, self._counted_s = resident_bytes, now_s
        return True


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def _answered(stub: Any) -> None:
    await stub.Check(health_pb2.HealthCheckRequest())


def _keep_none(peer: str) -> bool:
    return False


def _newest_server() -> int:
    """The core's id of the server that was made last; ids grow."""
    newest, page = 0, dict[str, Any]()
    while not page.get("end"):
        page = json.loads(cygrpc.channelz_get_servers(newest + 1))
        newest = max([newest, *(int(each["ref"]["serverId"]) for each in page.get("server", ()))])
    return newest
