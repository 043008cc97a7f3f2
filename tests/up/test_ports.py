"""Ports are settled before anything starts."""

from __future__ import annotations

import socket

import pytest

from loraplex.errors import AlreadyExists, InvalidRequest
from loraplex_services.up.flags import LISTENERS, Listener
from loraplex_services.up.ports import address_of, choose_ports

ANY = Listener("127.0.0.1", 0)


def test_zero_means_any_free_port_and_all_differ() -> None:
    chosen = choose_ports(dict.fromkeys(LISTENERS, ANY))
    assert len({listener.port for listener in chosen.values()}) == 3
    assert all(listener.port > 0 for listener in chosen.values())


def test_chosen_ports_can_be_listened_on() -> None:
    port = choose_ports({"--http-port": ANY})["--http-port"].port
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_taken_port_names_port_and_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(AlreadyExists, match=f"--grpc-port: port {port} is taken"):
            choose_ports({"--http-port": ANY, "--grpc-port": Listener("127.0.0.1", port)})


def test_one_port_for_two_flags_is_taken() -> None:
    port = choose_ports({"--http-port": ANY})["--http-port"].port
    with pytest.raises(AlreadyExists, match=f"port {port} is taken"):
        choose_ports(dict.fromkeys(("--http-port", "--grpc-port"), Listener("127.0.0.1", port)))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_foreign_host_is_named(host: str) -> None:
    with pytest.raises(InvalidRequest, match="--host"):
        choose_ports({"--http-port": Listener(host, 0)})


def test_addresses_bracket_ipv6() -> None:
    assert address_of("127.0.0.1", 80) == "127.0.0.1:80"
    assert address_of("::1", 80) == "[::1]:80"
