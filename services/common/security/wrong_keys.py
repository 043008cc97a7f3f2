"""Limits how many wrong keys of one peer are looked up.

Only keys that the server has not seen yet are refused to such a peer: the others need no lookup, so
that clients behind the same address as an attacker keep working.
"""

from __future__ import annotations

import functools
import ipaddress
import time
from collections.abc import Callable
from contextvars import ContextVar
from urllib.parse import unquote

from loraplex.errors import ResourceExhausted
from loraplex_services.common.limits import MAX_WRONG_KEYS_PER_PEER, WRONG_KEYS_PER_S
from loraplex_services.common.lru_cache import LruCache

MAX_PEERS = 10_000
_IPV6_NETWORK_BITS = 64
"""Prefix length in bits of an IPv6 network: one customer of a provider has at least that many
addresses."""

current_peer: ContextVar[str] = ContextVar("current_peer", default="")
"""Network address of the caller of the current call; "" for Unix sockets."""


class WrongKeys:
    """Wrong keys by peer: a token bucket for each of the peers that sent some last."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._peers: LruCache[str, tuple[float, float]] = LruCache(MAX_PEERS)
        """When a peer's last wrong key came, and how many it may still send."""

    def check(self) -> None:
        """Check the current peer before its key is looked up.

        Raises:
            ResourceExhausted: the peer has sent too many wrong keys.
        """
        peer = current_peer.get()
        left = self._left(peer)
        if peer and left < 1.0:
            raise ResourceExhausted(
                f"too many wrong API keys from {peer}; wait before you try another",
                reason="TOO_MANY_WRONG_KEYS",
                retry_after_s=(1.0 - left) / WRONG_KEYS_PER_S,
            )

    def count(self) -> None:
        """Note that the key of the current peer was wrong."""
        if peer := current_peer.get():
            self._peers.put(peer, (self._now(), self._left(peer) - 1.0))

    def _left(self, peer: str) -> float:
        last_s, left = self._peers.get(peer) or (self._now(), float(MAX_WRONG_KEYS_PER_PEER))
        return min(MAX_WRONG_KEYS_PER_PEER, left + (self._now() - last_s) * WRONG_KEYS_PER_S)


def peer_of_host(host: str) -> str:
    """The name that wrong keys are counted under: an IPv4 address, or the network of an IPv6
    address; "" if the host is neither."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False))


@functools.lru_cache(maxsize=1024)
def peer_of_grpc(peer: str) -> str:
    """The address in gRPC's name of a peer, such as `ipv4:127.0.0.1:4711`."""
    _, _, address = unquote(peer).partition(":")
    return peer_of_host(address.rpartition(":")[0].strip("[]"))
