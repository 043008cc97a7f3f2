"""Certificates that are replaced while servers run."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.common.security.rotation import Rotation
from loraplex_services.common.security.tls import TlsFiles, http_tls_files, tls_files
from loraplex_services.gateway.http.server import HttpServer
from tests.certificates import Authority


@pytest.fixture
def house(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


async def _serial(house: Authority, port: int, name: str = "localhost") -> str:
    """The serial number of the certificate that a server shows."""

    def shake_hands() -> str:
        context = ssl.create_default_context(cafile=house.ca)
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            shown = secure.getpeercert()
        assert shown is not None
        return str(shown["serialNumber"])

    return await asyncio.to_thread(shake_hands)


def test_files_count_as_replaced_once_and_only_when_they_belong_together(house: Authority) -> None:
    pair = house.issue("server")
    rotation = Rotation(None, pair=(pair.cert, pair.key))
    assert not rotation.is_renewed()
    other = house.issue("other")
    pair.cert.write_bytes(other.cert.read_bytes())
    assert not rotation.is_renewed()
    pair.key.unlink()
    assert not rotation.is_renewed()
    pair.key.write_bytes(other.key.read_bytes())
    assert rotation.is_renewed()
    assert not rotation.is_renewed()


@pytest.mark.parametrize("days", [-2, 2])
def test_a_certificate_that_is_not_valid_now_does_not_replace_another(
    house: Authority, caplog: pytest.LogCaptureFixture, days: int
) -> None:
    pair = house.issue("server")
    rotation = Rotation(None, pair=(pair.cert, pair.key))
    house.issue("server", days_from_now=days)
    assert not rotation.is_renewed() and not rotation.is_renewed()
    (warning,) = caplog.records
    assert ("expired" if days < 0 else "not yet valid") in warning.__dict__["error"]
    house.issue("server")
    assert rotation.is_renewed()


def test_a_ca_counts_as_replaced_only_when_it_can_be_used(house: Authority, tmp_path: Path) -> None:
    rotation = Rotation(house.ca, pair=None)
    house.ca.unlink()
    assert not rotation.is_renewed()
    house.ca.write_text("half of it")
    assert not rotation.is_renewed()
    house.ca.write_bytes(Authority(tmp_path / "other").ca.read_bytes())
    assert rotation.is_renewed()


@pytest.mark.parametrize("name", ["LORAPLEX_CERT", "LORAPLEX_HTTP_CERT"])
def test_a_service_that_starts_with_an_expired_certificate_warns(
    house: Authority, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for days in (0, -2):
        pair = house.issue("server", days_from_now=days)
        read = tls_files if name == "LORAPLEX_CERT" else http_tls_files
        read({name: str(pair.cert), "LORAPLEX_KEY": str(pair.key)})
    (warning,) = caplog.records
    assert warning.__dict__["error"] == "certificate has expired"


async def test_a_grpc_server_shows_the_certificate_that_is_in_the_file_now(
    house: Authority,
) -> None:
    pair = house.issue("server")
    server = TlsFiles(cert=pair.cert, key=pair.key).server()
    running = await grpc_server.start([], ["127.0.0.1:0"], tls=server)
    first = await _serial(house, running.port)
    house.issue("server")
    second = await _serial(house, running.port)
    pair.key.write_text("half of it")
    third = await _serial(house, running.port)
    await running.stop(0)
    assert first != second == third


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
async def test_the_http_server_shows_the_certificate_that_is_in_the_file_now(
    house: Authority, name: str
) -> None:
    """Also to clients that name no host, as those do that dial an address."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asks")

    pair = house.issue("server")
    tls = TlsFiles(cert=pair.cert, key=pair.key)
    server = HttpServer(app, "127.0.0.1:0", setting="--listen", tls=tls)
    await server.start()
    first = await _serial(house, server.port, name)
    house.issue("server")
    seen = [await _serial(house, server.port, name) for _ in range(2)]
    pair.key.write_text("half of it")
    seen.append(await _serial(house, server.port, name))
    await server.stop(1)
    assert first not in seen and len(set(seen)) == 1
