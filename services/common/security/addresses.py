"""Tells which addresses only this machine can reach."""

from __future__ import annotations

import ipaddress


def is_local(address: str) -> bool:
    """Whether a server on this address, HOST:PORT or unix:/path, is out of others' reach."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """True for localhost, names under it and loopback addresses, bracketed or not."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
