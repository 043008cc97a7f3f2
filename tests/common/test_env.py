"""The table of variables: every default is legal, bad values and unknown names are named."""

import pwd
from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest
from loraplex_services.common.settings import env, switches, variables
from loraplex_services.common.settings.setting import Setting
from loraplex_services.common.units import Memory


def test_no_name_looks_like_what_kubernetes_injects() -> None:
    for name in variables.known_names():
        assert name.startswith("LORAPLEX_")
        assert not name.endswith(("_PORT", "_HOST")), name


def test_a_user_without_a_home_has_a_default_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written there if the store and the index are elsewhere."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert variables.default_state_dir({}).name == "loraplex"


def test_unset_and_empty_mean_the_default() -> None:
    assert env.DRAIN_S.read({}) == 20.0
    assert env.DRAIN_S.read({"LORAPLEX_DRAIN_S": ""}) == 20.0


@pytest.mark.parametrize("setting", env.ALL_SETTINGS, ids=lambda setting: setting.name)
def test_documented_default_is_what_the_parser_would_accept(setting: Setting[object]) -> None:
    assert setting.doc.endswith(".")
    if isinstance(setting.default, str) and setting.default:
        assert setting.parse(setting.default) == setting.default


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        (env.KV_MEMORY, "24MiB", Memory(24 << 20)),
        (env.DRAIN_S, "500ms", 0.5),
        (env.FULLY_SHARDED_LORAS, "yes", True),
        (env.WORKERS, "unix:/a, 10.0.0.1:5", ("unix:/a", "10.0.0.1:5")),
        (env.DEVICE, "cuda", "cuda"),
        (env.HTTP_LISTEN, "[::1]:0", "[::1]:0"),
        (env.MAX_LORA_RANK, "64", 64),
    ],
)
def test_reads_typed_values(setting: Setting[object], text: str, value: object) -> None:
    assert setting.read({setting.name: text}) == value


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (env.KV_MEMORY, "lots"),
        (env.DRAIN_S, "-1"),
        (env.FULLY_SHARDED_LORAS, "maybe"),
        (env.DEVICE, "tpu"),
        (env.ATTENTION_BACKEND, "flashinfer2"),
        (env.MAX_REQUEST_S, "0"),
        (env.HTTP_LISTEN, "8080"),
        (env.HTTP_LISTEN, "127.0.0.1:70000"),
        (env.MAX_LORA_RANK, "0"),
        (env.OBJECTS, "  "),
    ],
)
def test_bad_value_names_the_variable(setting: Setting[object], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        setting.read({setting.name: text})
    assert caught.value.violations[0].field == setting.name


def test_secret_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("lpx_a_b\n")
    assert env.API_KEY.read({"LORAPLEX_API_KEY_FILE": str(path)}) == "lpx_a_b"


def test_a_bad_value_is_shown_unless_it_is_secret() -> None:
    with pytest.raises(InvalidRequest, match=r"LORAPLEX_DEVICE: expected .*, got 'tpu'"):
        env.DEVICE.read({"LORAPLEX_DEVICE": "tpu"})
    with pytest.raises(InvalidRequest) as refused:
        env.API_KEY.read({"LORAPLEX_API_KEY": " "})
    assert "got" not in str(refused.value)


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


def test_switches_are_read_from_one_list() -> None:
    environ = {"LORAPLEX_DEBUG": "overlap=on, replace-bases ,step-timeout-s=500ms"}
    variables.check_switches(environ)
    assert switches.REPLACE_BASES.read(environ) is True
    assert switches.STEP_TIMEOUT_S.read(environ) == 0.5
    assert switches.OVERLAP.read(environ) == "on"
    assert switches.PREFIX_CACHE.read(environ) == switches.PREFIX_CACHE.default


def test_of_a_repeated_switch_the_last_one_counts() -> None:
    environ = {"LORAPLEX_DEBUG": "overlap=on,overlap=off"}
    assert switches.OVERLAP.read(environ) == "off"


def test_an_unknown_switch_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"over_lap.*overlap") as caught:
        variables.check_switches({"LORAPLEX_DEBUG": "over_lap=on"})
    assert caught.value.violations[0].field == "LORAPLEX_DEBUG"


def test_a_bad_value_of_a_switch_names_the_switch() -> None:
    with pytest.raises(InvalidRequest) as caught:
        switches.OVERLAP.read({"LORAPLEX_DEBUG": "overlap=mmx"})
    violation = caught.value.violations[0]
    assert (violation.field, violation.value) == ("LORAPLEX_DEBUG", "overlap=mmx")
