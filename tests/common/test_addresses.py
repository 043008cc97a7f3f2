"""Addresses of this machine alone, distinguished from those that others reach."""

from __future__ import annotations

import pytest

from loraplex_services.common.security.addresses import is_local, is_loopback


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "localhost", "door.localhost", "::1", "[::1]"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host) and is_local(f"{host}:50051")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "example.org", "127.0.0.1.example.org", ""]
)
def test_addresses_that_others_reach(host: str) -> None:
    assert not is_loopback(host) and not is_local(f"{host}:50051")


def test_a_socket_file_is_local() -> None:
    assert is_local("unix:/run/loraplex/registry.sock")
