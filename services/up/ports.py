"""Chooses and checks the ports of the stack before any child starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from loraplex.errors import AlreadyExists, InvalidRequest
from loraplex_services.up.flags import Listener


def address_of(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def choose_ports(wanted: Mapping[str, Listener]) -> dict[str, Listener]:
    """A usable port for each flag.

    Args:
        wanted: listener by flag; port 0 = any free one.

    Raises:
        AlreadyExists: a port is taken; names port and flag.
        InvalidRequest: a host is not an address of this machine.
    """
    held: list[socket.socket] = []
    chosen: dict[str, Listener] = {}
    try:
        # Explicit ports first, so that a free one drawn for another flag is not one of them.
        for flag, listener in sorted(wanted.items(), key=lambda item: item[1].port == 0):
            holder = _bound(listener.host, listener.port, flag)
            held.append(holder)
            chosen[flag] = Listener(listener.host, holder.getsockname()[1])
    finally:
        for holder in held:
            holder.close()
    return chosen


def _bound(host: str, port: int, flag: str) -> socket.socket:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        holder = socket.socket(family, kind, protocol)
    except socket.gaierror:
        raise InvalidRequest.field("--host", host, "is not a known address") from None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(target)
        holder.listen(1)
    except OSError as error:
        holder.close()
        if error.errno == errno.EADDRINUSE:
            raise AlreadyExists(
                f"{flag}: port {port} is taken; choose another, or 0 for any free one",
                reason="PORT_TAKEN",
            ) from None
        if error.errno == errno.EACCES:
            raise InvalidRequest.field(flag, port, "needs privileges; choose one above 1023") from (
                None
            )
        raise InvalidRequest.field("--host", host, f"cannot listen: {error.strerror}") from None
    return holder
