"""How ranks find rank 0: over TCP, each end proving that it knows the group's secret.

    rank 0 -> rank   nonce (32 bytes)
    rank -> rank 0   nonce (32), proof (32)
    rank 0 -> rank   proof (32), zeros if the rank's was wrong

A proof is an HMAC over both nonces, so that the secret is never sent. Nothing that an unproved end
sends is parsed. Rank 0 listens only while a group forms.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from loraplex.errors import InvalidRequest, LoraplexError, Unauthenticated
from loraplex_services.worker.runner.parallel.messages import (
    Build,
    Join,
    RankLost,
    RankSocket,
    Refuse,
    check_equal,
    close_socket,
)
from loraplex_services.worker.types.messages import WireError
from loraplex_services.worker.types.nodes import Nodes

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
UNSPECIFIED = ("0.0.0.0", "::")
"""The addresses of sockets that listen on all interfaces."""
NONCE_BYTES = PROOF_BYTES = 32
HANDSHAKE_S = 10.0
"""Seconds that the other end may take to prove itself."""
MAX_HANDSHAKES = 64
"""Connections that may be proving themselves at a time; further ones wait."""
RETRY_S = 0.5
"""Seconds between attempts to reach rank 0, and between looks at the ranks' processes."""
KEEPALIVE_S = 5
NUM_KEEPALIVES = 3
"""A machine that is lost is noticed after about 20 seconds without an answer."""
SOCKET_BUFFER_BYTES = 4 << 20

Channel = tuple[int, bool]
"""A rank, and whether the connection is for images."""


class Rendezvous:
    """Rank 0's end."""

    def __init__(self, nodes: Nodes, token: str) -> None:
        """Listen. Raises InvalidRequest if the port is not available."""
        self._token = token
        self._joined: queue.SimpleQueue[tuple[Join, RankSocket]] = queue.SimpleQueue()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._listener = _listen(nodes)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{LOOPBACK if host in UNSPECIFIED else host}:{port}"
        """Where ranks of this machine reach it."""
        threading.Thread(target=self._accept, daemon=True, name="rendezvous").start()

    def await_ranks(
        self,
        expected: set[Channel],
        build: Build,
        timeout_s: float,
        check: Callable[[], None],
    ) -> dict[Channel, RankSocket]:
        """Wait for all other ranks. If a rank connects again, its last connection counts.

        Args:
            check: called again and again; raises if waiting is useless.

        Raises:
            InvalidRequest: a rank has another build or number.
            RankLost: not all came in time.
        """
        found: dict[Channel, RankSocket] = {}
        deadline_s = time.monotonic() + timeout_s
        while missing := sorted(expected - set(found)):
            check()
            if time.monotonic() > deadline_s:
                ranks = ", ".join(str(rank) for rank, is_images in missing if not is_images)
                raise RankLost(
                    f"tensor_parallel: no connection of ranks {ranks or 'for images'} within "
                    f"{timeout_s:g} s"
                )
            try:
                join, end = self._joined.get(timeout=RETRY_S)
            except queue.Empty:
                continue
            channel = join.rank, join.is_for_images
            try:
                check_equal(build, join.build, join.rank)
                if channel not in expected:
                    why = f"rank 0 expects {sorted(rank for rank, _ in expected)}"
                    raise InvalidRequest.field("tensor_parallel:rank", join.rank, why)
            except InvalidRequest as error:
                end.send(Refuse(WireError.of(error)))
                raise
            if (earlier := found.pop(channel, None)) is not None:
                earlier.close()
            found[channel] = end
            logger.info("a rank has joined", extra={"rank": join.rank})
        return found

    def close(self) -> None:
        """Stop listening."""
        close_socket(self._listener)

    def _accept(self) -> None:
        while True:
            self._handshakes.acquire()
            try:
                end, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._accept_rank, args=(end,), daemon=True).start()

    def _accept_rank(self, end: socket.socket) -> None:
        try:
            end.settimeout(HANDSHAKE_S)
            if not prove_leader(end, self._token):
                logger.warning(
                    "a connection without the secret", extra={"peer": end.getpeername()[0]}
                )
                end.close()
                return
            _tune(end)
            rank = RankSocket(end)
            join = rank.reply()
            assert isinstance(join, Join), "the first message says who connects"
            end.settimeout(None)
            self._joined.put((join, rank))
        except (OSError, RankLost, msgspec.MsgspecError) as error:
            logger.warning("a rank could not join", extra={"reason": str(error)})
            end.close()
        finally:
            self._handshakes.release()


def connect(address: str, token: str, join: Join, timeout_s: float) -> RankSocket:
    """Reach rank 0, which may start later.

    Raises:
        Unauthenticated: rank 0 does not know the secret, or this end does not.
        RankLost: there is no rank 0 at `address` in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            end = _reach(address, token)
            break
        except OSError as error:
            if time.monotonic() > deadline_s:
                what = f"rank {join.rank} has not reached rank 0 at {address}"
                raise RankLost(f"tensor_parallel: {what} within {timeout_s:g} s: {error}") from None
            time.sleep(RETRY_S)
    rank_zero = RankSocket(end)
    rank_zero.send(join)
    return rank_zero


def _reach(address: str, token: str) -> socket.socket:
    """Raises OSError to be tried again, or LoraplexError."""
    end = socket.create_connection(host_and_port(address), HANDSHAKE_S)
    try:
        if not prove_rank(end, token):
            raise Unauthenticated(
                f"rank 0 at {address} and this rank do not have the same secret: all nodes need "
                "the same LORAPLEX_SERVICE_TOKEN_FILE"
            )
        end.settimeout(None)
        _tune(end)
    except (OSError, LoraplexError):
        end.close()
        raise
    return end


def prove_leader(end: socket.socket, token: str) -> bool:
    """Rank 0's part of the handshake: whether the other end knows one of the secrets."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    end.sendall(nonce)
    answer = receive(end, NONCE_BYTES + PROOF_BYTES)
    nonces, proof = nonce + answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    known = [t for t in token.split() if hmac.compare_digest(_proof(t, b"rank", nonces), proof)]
    end.sendall(_proof(known[0], b"rank 0", nonces) if known else bytes(PROOF_BYTES))
    return bool(known)


def prove_rank(end: socket.socket, token: str) -> bool:
    """A rank's part of the handshake: whether the other end knows the secret."""
    own = token.split()[0]
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = receive(end, NONCE_BYTES) + nonce
    end.sendall(nonce + _proof(own, b"rank", nonces))
    return hmac.compare_digest(_proof(own, b"rank 0", nonces), receive(end, PROOF_BYTES))


def receive(end: socket.socket, num_bytes: int) -> bytes:
    """Read exactly that many bytes. Raises OSError."""
    data = b""
    while len(data) < num_bytes:
        part = end.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        data += part
    return data


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `HOST:PORT` or `[IPV6]:PORT`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), role + nonces, "sha256")


def _listen(nodes: Nodes) -> socket.socket:
    if not nodes.master_addr:
        return socket.create_server((LOOPBACK, 0))
    host, port = host_and_port(nodes.master_addr)
    try:
        if _is_literal(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        why = f"rank 0 cannot listen there: {error.strerror or error}"
        raise InvalidRequest.field("master_addr", nodes.master_addr, why) from None


def _is_literal(host: str) -> bool:
    """Whether this is an address and not a name, which may be that of a service."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _tune(end: socket.socket) -> None:
    """Send small messages without delay, and notice machines that are lost."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {
        "TCP_KEEPIDLE": KEEPALIVE_S,
        "TCP_KEEPINTVL": KEEPALIVE_S,
        "TCP_KEEPCNT": NUM_KEEPALIVES,
        "TCP_USER_TIMEOUT": 1000 * KEEPALIVE_S * (NUM_KEEPALIVES + 1),
    }
    for name, value in limits.items():
        if hasattr(socket, name):  # macOS lacks some
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
