"""Tools connect where the environment says, and agree with the table of variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from loraplex.client import settings
from loraplex.client.channel import Channel
from loraplex.client.settings import Credentials
from loraplex.errors import InvalidRequest
from loraplex_services.common.settings import env


def test_defaults_are_those_of_the_table() -> None:
    assert settings.registry_address({}) == env.REGISTRY_ADDRESS.default
    assert settings.gateway_address({}) == env.GATEWAY_ADDRESS.default


def test_reads_every_variable_of_the_tools(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(name)
    found = settings.credentials(
        {
            "LORAPLEX_API_KEY": "lpx_a_b",
            "LORAPLEX_CA": str(tmp_path / "ca"),
            "LORAPLEX_CERT": str(tmp_path / "cert"),
            "LORAPLEX_KEY": str(tmp_path / "key"),
        }
    )
    expected = Credentials("lpx_a_b", tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    assert found == expected
    assert found.uses_tls and not Credentials().uses_tls


def test_key_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("lpx_a_b\n")
    found = settings.credentials({"LORAPLEX_API_KEY_FILE": str(tmp_path / "key")})
    assert found.api_key == "lpx_a_b"


def test_missing_file_names_the_variable() -> None:
    with pytest.raises(InvalidRequest, match="LORAPLEX_CA"):
        settings.credentials({"LORAPLEX_CA": "no/such/file"})


@pytest.mark.parametrize("key", ["lpx_a_größe", "lpx_a_b\nlpx_c_d", "lpx_a_\x7f"])
def test_a_key_that_no_header_can_hold_names_its_variable_and_is_not_shown(
    tmp_path: Path, key: str
) -> None:
    (tmp_path / "key").write_text(key)
    file = {"LORAPLEX_API_KEY_FILE": str(tmp_path / "key")}
    for name, environ in (("_KEY", {"LORAPLEX_API_KEY": key}), ("_KEY_FILE", file)):
        with pytest.raises(
            InvalidRequest, match=f"LORAPLEX_API{name}: must hold one line"
        ) as caught:
            settings.credentials(environ)
        assert "lpx_" not in str(caught.value)


def test_a_key_file_that_is_no_text_names_its_variable(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match=r"LORAPLEX_API_KEY_FILE: .*not UTF-8"):
        settings.credentials({"LORAPLEX_API_KEY_FILE": str(tmp_path / "key")})


def test_key_is_not_shown() -> None:
    assert "secret" not in repr(Credentials("lpx_a_secret"))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (settings.registry_address, "LORAPLEX_REGISTRY_ADDRESS"),
        (settings.gateway_address, "LORAPLEX_GATEWAY_ADDRESS"),
    ],
)
def test_an_address_without_a_port_names_its_variable(
    read: Callable[[Mapping[str, str]], str], name: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({name: "localhost"})
    assert caught.value.violations[0].field == name


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "a:x",
        "a:",
        ":1",
        "a:0",
        "a:65536",
        "::1:50052",
        "http://a:1",
        "a:1/v1",
        "a b:1",
    ],
)
def test_an_address_that_cannot_be_one_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        Channel(address, Credentials(), "registry")


@pytest.mark.parametrize(
    "address", ["a:1", "a.b-c_d:65535", "[::1]:50052", "unix:/a/b.sock", "dns:///a:1", "dns:a"]
)
def test_hosts_with_a_port_and_grpc_addresses_are_taken(address: str) -> None:
    assert Channel(address, Credentials(), "registry").address == address


def test_an_address_with_a_scheme_is_shown_without_it() -> None:
    with pytest.raises(InvalidRequest, match=r"try 'gateway:50051'"):
        Channel("http://gateway:50051/", Credentials(), "gateway")


@pytest.mark.parametrize("field", ["ca", "cert"])
def test_a_tls_file_that_is_no_certificate_is_refused_by_name(tmp_path: Path, field: str) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    given = Credentials(ca=wrong) if field == "ca" else Credentials(cert=wrong, key=wrong)
    with pytest.raises(InvalidRequest) as caught:
        Channel("127.0.0.1:1", given, "gateway").stub(lambda channel: channel)
    assert caught.value.violations[0].field == field
    assert caught.value.violations[0].value == str(wrong)


@pytest.mark.parametrize(("given", "missing"), [("cert", "key"), ("key", "cert")])
def test_a_certificate_needs_its_key(tmp_path: Path, given: str, missing: str) -> None:
    credentials = Credentials(**{given: tmp_path / "client.pem"})
    with pytest.raises(InvalidRequest) as caught:
        Channel("127.0.0.1:1", credentials, "gateway").stub(lambda channel: channel)
    assert caught.value.violations[0].field == missing
