"""Settings: a bad one stops the start and is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest
from loraplex_services.gateway.config import from_env
from tests.certificates import Authority

GOOD = {"LORAPLEX_WORKERS": "unix:/run/w0.sock,127.0.0.1:50053,dns:workers:50053"}


def test_defaults_are_for_this_machine_only() -> None:
    config = from_env(GOOD)
    assert config.http_listen == "127.0.0.1:8080"
    assert config.grpc_listen == "127.0.0.1:50051"
    assert config.max_request_s == 600
    assert config.admission.max_running == 4096
    assert config.is_local


@pytest.mark.parametrize(
    ("changes", "variable"),
    [
        ({"LORAPLEX_WORKERS": ""}, "LORAPLEX_WORKERS"),
        ({"LORAPLEX_WORKERS": "nonsense"}, "LORAPLEX_WORKERS"),
        ({"LORAPLEX_WORKERS": "dns:workers"}, "LORAPLEX_WORKERS"),
        ({"LORAPLEX_HTTP_LISTEN": "8080"}, "LORAPLEX_HTTP_LISTEN"),
        ({"LORAPLEX_HTTP_LISTEN": "0.0.0.0:8080"}, "LORAPLEX_HTTP_LISTEN"),
        ({"LORAPLEX_GATEWAY_LISTEN": "[::]:50051"}, "LORAPLEX_HTTP_LISTEN"),
        ({"LORAPLEX_MAX_REQUEST_S": "soon"}, "LORAPLEX_MAX_REQUEST_S"),
        ({"LORAPLEX_DEBUG": "tool-call-parser=xml"}, "LORAPLEX_DEBUG"),
        ({"LORAPLEX_AUTH": "keys"}, "LORAPLEX_SERVICE_TOKEN_FILE"),
        ({"LORAPLEX_SERVICE_TOKEN_FILE": "/does/not/exist"}, "LORAPLEX_SERVICE_TOKEN_FILE"),
    ],
    ids=str,
)
def test_bad_setting_is_named(changes: dict[str, str], variable: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_env(GOOD | changes)
    assert caught.value.violations[0].field == variable


def test_other_machines_may_call_when_that_is_said() -> None:
    open_to_all = {"LORAPLEX_HTTP_LISTEN": "0.0.0.0:8080", "LORAPLEX_AUTH": "insecure"}
    assert not from_env(GOOD | open_to_all).is_local


def test_with_keys_other_machines_may_connect(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s" * 32 + "\n")
    keys = {
        "LORAPLEX_HTTP_LISTEN": "0.0.0.0:8080",
        "LORAPLEX_AUTH": "keys",
        "LORAPLEX_SERVICE_TOKEN_FILE": str(tmp_path / "token"),
    }
    config = from_env(GOOD | keys)
    assert config.wants_keys
    assert config.service_token == "s" * 32


def test_the_key_of_http_is_in_the_file_of_its_certificate_or_next_to_it(tmp_path: Path) -> None:
    one, other = Authority(tmp_path / "a").issue("one"), Authority(tmp_path / "b").issue("other")
    both, beside, alone, wrong = (tmp_path / f"{name}.crt" for name in "abcd")
    both.write_bytes(one.cert.read_bytes() + one.key.read_bytes())
    for cert in (beside, alone, wrong):
        cert.write_bytes(one.cert.read_bytes())
    beside.with_suffix(".key").write_bytes(one.key.read_bytes())
    wrong.with_suffix(".key").write_bytes(other.key.read_bytes())
    for good, key in ((both, both), (beside, beside.with_suffix(".key"))):
        files = from_env(GOOD | {"LORAPLEX_HTTP_CERT": str(good)}).http_tls
        assert (files.cert, files.key) == (good, key)
    for bad in (alone, wrong, tmp_path):
        with pytest.raises(InvalidRequest) as caught:
            from_env(GOOD | {"LORAPLEX_HTTP_CERT": str(bad)})
        assert caught.value.violations[0].field == "LORAPLEX_HTTP_CERT"
