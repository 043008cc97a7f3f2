"""The table of variables: every default is legal, bad values and unknown names are named."""

from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest
from loraplex_services.common import env, variables
from loraplex_services.common.knob import Knob
from loraplex_services.common.units import Memory


def test_no_name_looks_like_what_kubernetes_injects() -> None:
    for name in variables.known_names():
        assert name.startswith("LORAPLEX_")
        assert not name.endswith(("_PORT", "_HOST")), name


def test_unset_and_empty_mean_the_default() -> None:
    assert env.DRAIN_S.read({}) == 20.0
    assert env.DRAIN_S.read({"LORAPLEX_DRAIN_S": ""}) == 20.0


@pytest.mark.parametrize("knob", env.ALL_KNOBS, ids=lambda knob: knob.name)
def test_documented_default_is_what_the_parser_would_accept(knob: Knob[object]) -> None:
    assert knob.doc.endswith(".")
    if isinstance(knob.default, str) and knob.default:
        assert knob.parse(knob.default) == knob.default


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        (env.KV_MEMORY, "24MiB", Memory(24 << 20)),
        (env.DRAIN_S, "500ms", 0.5),
        (env.INSECURE, "yes", True),
        (env.WORKERS, "unix:/a, 10.0.0.1:5", ("unix:/a", "10.0.0.1:5")),
        (env.DEVICE, "cuda", "cuda"),
        (env.HTTP_LISTEN, "[::1]:0", "[::1]:0"),
        (env.MAX_LORA_RANK, "64", 64),
    ],
)
def test_reads_typed_values(knob: Knob[object], text: str, value: object) -> None:
    assert knob.read({knob.name: text}) == value


@pytest.mark.parametrize(
    ("knob", "text"),
    [
        (env.KV_MEMORY, "lots"),
        (env.DRAIN_S, "-1"),
        (env.INSECURE, "maybe"),
        (env.DEVICE, "tpu"),
        (env.ATTENTION_BACKEND, "flashinfer"),
        (env.HTTP_LISTEN, "8080"),
        (env.HTTP_LISTEN, "127.0.0.1:70000"),
        (env.MAX_LORA_RANK, "0"),
        (env.OBJECTS, "  "),
    ],
)
def test_bad_value_names_the_variable(knob: Knob[object], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        knob.read({knob.name: text})
    assert caught.value.violations[0].field == knob.name


def test_secret_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("lpx_a_b\n")
    assert env.API_KEY.read({"LORAPLEX_API_KEY_FILE": str(path)}) == "lpx_a_b"


def test_missing_secret_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="LORAPLEX_API_KEY_FILE"):
        env.API_KEY.read({"LORAPLEX_API_KEY_FILE": str(tmp_path / "none")})


def test_unknown_variable_is_reported_with_the_nearest_known_one() -> None:
    [warning] = variables.unknown_variables({"LORAPLEX_KV_MEMROY": "1", "PATH": "/bin"})
    assert "LORAPLEX_KV_MEMROY" in warning
    assert warning.endswith("LORAPLEX_KV_MEMORY")


@pytest.mark.parametrize(
    "name",
    [
        "LORAPLEX_GATEWAY_PORT",
        "LORAPLEX_GATEWAY_PORT_8080_TCP",
        "LORAPLEX_GATEWAY_PORT_8080_TCP_ADDR",
        "LORAPLEX_GATEWAY_SERVICE_HOST",
        "LORAPLEX_GATEWAY_SERVICE_PORT_GRPC",
        "LORAPLEX_REGISTRY_HOST",
    ],
)
def test_service_links_are_ignored(name: str) -> None:
    assert variables.unknown_variables({name: "tcp://10.0.0.1:80"}) == []


def test_known_names_are_not_reported() -> None:
    assert variables.unknown_variables(dict.fromkeys(variables.known_names(), "x")) == []
