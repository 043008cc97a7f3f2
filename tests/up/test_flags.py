"""Flags over variables, the last repetition wins, and bad values are named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest
from loraplex_services.common.settings import env
from loraplex_services.common.units import Memory
from loraplex_services.up.flags import Listener, named_as_given, parse

BASE = str(Path(__file__).parents[2] / "demo" / "base")
MODEL = ["--model", BASE]


def test_defaults_are_loopback_one_worker_and_the_documented_ports() -> None:
    config = parse(MODEL, {"XDG_STATE_HOME": "/x"})
    assert list(config.listeners.values()) == [
        Listener("127.0.0.1", p) for p in (8080, 50051, 50052)
    ]
    assert (config.num_workers, config.drain_s) == (1, 20.0)
    assert config.worker == {"LORAPLEX_MODEL": BASE}, "workers have defaults of their own"
    assert config.state_dir == Path("/x/loraplex")


def test_state_defaults_to_the_home_folder() -> None:
    assert parse(MODEL, {}).state_dir == Path.home() / ".local/state/loraplex"


def test_flags_win_over_variables_and_the_last_over_the_first() -> None:
    environ = {"LORAPLEX_MODEL": BASE, "LORAPLEX_KV_MEMORY": "1GiB", "LORAPLEX_DEVICE": "cpu"}
    config = parse(["--kv-memory", "1MiB", "--kv-memory", "24MiB"], environ)
    assert config.worker == {"LORAPLEX_MODEL": BASE, "LORAPLEX_KV_MEMORY": "24MiB"}


def test_listen_variables_stand_in_for_host_and_ports() -> None:
    environ = {"LORAPLEX_HTTP_LISTEN": "127.0.0.2:9", "LORAPLEX_GATEWAY_LISTEN": "[::1]:0"}
    listeners = parse([*MODEL, "--registry-port", "7"], environ).listeners
    assert list(listeners.values()) == [
        Listener("127.0.0.2", 9),
        Listener("::1", 0),
        Listener("127.0.0.1", 7),
    ]
    listeners = parse([*MODEL, "--http-port", "8", "--host", "localhost"], environ).listeners
    assert list(listeners.values()) == [Listener("localhost", p) for p in (8, 0, 50052)]


def test_an_address_of_ipv6_may_have_brackets() -> None:
    listeners = parse([*MODEL, "--host", "[::1]"], {}).listeners
    assert {listener.host for listener in listeners.values()} == {"::1"}


def test_a_misspelt_flag_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--modl", BASE], {})
    assert "; did you mean '--model'?" in capsys.readouterr().err


def test_a_bad_value_of_a_flag_is_shown() -> None:
    with pytest.raises(InvalidRequest, match=r"--dtype: expected one of .*, got 'float8'"):
        parse([*MODEL, "--dtype", "float8"], {})


@pytest.mark.parametrize("url", ["nonsense", "http://x", "redis+sentinel://a:1"])
def test_a_metadata_server_that_cannot_be_one_is_refused_with_all_forms(url: str) -> None:
    with pytest.raises(InvalidRequest, match="LORAPLEX_METADATA: must be embedded, redis://HOST"):
        parse(MODEL, {"LORAPLEX_METADATA": url})
    for fine in ("", "embedded", "redis://x:1", "redis+sentinel://a:1/mymaster"):
        parse(MODEL, {"LORAPLEX_METADATA": fine})


def test_workers_variable_is_a_number_here() -> None:
    assert parse(MODEL, {"LORAPLEX_WORKERS": "3"}).num_workers == 3
    assert parse([*MODEL, "--workers", "2"], {"LORAPLEX_WORKERS": "3"}).num_workers == 2


def test_model_folder_becomes_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(BASE).parent)
    assert parse(["--model", "base"], {}).worker["LORAPLEX_MODEL"] == BASE


def test_a_gguf_file_and_a_folder_with_one_are_models(tmp_path: Path) -> None:
    (tmp_path / "base.gguf").touch()
    for model in (tmp_path / "base.gguf", tmp_path):
        assert parse(["--model", str(model)], {}).worker["LORAPLEX_MODEL"] == str(model)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(InvalidRequest, match="name one"):
        parse(["--model", str(tmp_path)], {})


def test_a_link_to_a_model_keeps_its_name(tmp_path: Path) -> None:
    """The hub's cache has links to files that are named after their digests."""
    (tmp_path / "0a1b2c").touch()
    (tmp_path / "base.gguf").symlink_to("0a1b2c")
    (tmp_path / "current").symlink_to(BASE)
    for name in ("base.gguf", "current"):
        link = str(tmp_path / name)
        assert parse(["--model", link], {}).worker["LORAPLEX_MODEL"] == link


@pytest.mark.parametrize("model", ["acme/tiny-llama", "s3://bucket/model"])
def test_other_models_pass_through(model: str) -> None:
    assert parse(["--model", model], {}).worker["LORAPLEX_MODEL"] == model


@pytest.mark.parametrize(
    ("argv", "environ", "field"),
    [
        ([], {}, "--model"),
        (["--model", "no/such/folder/at/all"], {}, "--model"),
        (["--model", "./nothing"], {}, "--model"),
        (["--model", "s3:///base"], {}, "--model"),
        (["--model", str(Path(BASE).parent)], {}, "--model"),
        ([*MODEL, "--http-port", "70000"], {}, "--http-port"),
        (MODEL, {"LORAPLEX_HTTP_LISTEN": "8080"}, "LORAPLEX_HTTP_LISTEN"),
        (MODEL, {"LORAPLEX_GATEWAY_LISTEN": "unix:/x"}, "LORAPLEX_GATEWAY_LISTEN"),
        (MODEL, {"LORAPLEX_REGISTRY_LISTEN": "0.0.0.0:1"}, "--host"),
        (MODEL, {"LORAPLEX_WORKERS": "dns:workers:50053"}, "LORAPLEX_WORKERS"),
        ([*MODEL, "--workers", "0"], {}, "--workers"),
        ([*MODEL, "--kv-memory", "plenty"], {}, "--kv-memory"),
        ([*MODEL, "--kv-memory", "0%"], {}, "--kv-memory"),
        ([*MODEL, "--kv-memory", "101%"], {}, "--kv-memory"),
        ([*MODEL, "--kv-memory", "nan%"], {}, "--kv-memory"),
        ([*MODEL, "--kv-memory", "0"], {}, "--kv-memory"),
        (MODEL, {"LORAPLEX_KV_MEMORY": "0MiB"}, "LORAPLEX_KV_MEMORY"),
        ([*MODEL, "--max-loras", "0"], {}, "--max-loras"),
        ([*MODEL, "--max-loras", "-1"], {}, "--max-loras"),
        ([*MODEL, "--max-model-len", str(10**20)], {}, "--max-model-len"),
        ([*MODEL, "--state-dir", ""], {}, "--state-dir"),
        ([*MODEL, "--max-model-len", "0"], {}, "--max-model-len"),
        ([*MODEL, "--gpu-memory-utilization", "-0.5"], {}, "--gpu-memory-utilization"),
        ([*MODEL, "--gpu-memory-utilization", "0"], {}, "--gpu-memory-utilization"),
        ([*MODEL, "--gpu-memory-utilization", "90"], {}, "--gpu-memory-utilization"),
        ([*MODEL, "--max-model-len", "-1"], {}, "--max-model-len"),
        ([*MODEL, "--lora-dtype", "fp8"], {}, "--lora-dtype"),
        ([*MODEL, "--device", "tpu"], {}, "--device"),
        ([*MODEL, "--drain-s", "soon"], {}, "--drain-s"),
        (MODEL, {"LORAPLEX_DTYPE": "int8"}, "LORAPLEX_DTYPE"),
        ([*MODEL, "--host", "0.0.0.0"], {}, "--host"),
        ([*MODEL, "--host", "example.org"], {}, "--host"),
    ],
)
def test_bad_values_name_flag_or_variable(
    argv: list[str], environ: dict[str, str], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(argv, environ)
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize("size", ["plenty", "0", "24XB"])
def test_an_invalid_memory_size_is_refused_with_examples_of_both_forms(size: str) -> None:
    with pytest.raises(InvalidRequest, match="such as 24MiB, or a percentage such as 85%"):
        parse([*MODEL, "--kv-memory", size], {})


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (["--max-model-len", "9"], {}, "--max-model-len: must"),
        (["--max-model-len", "9"], {"LORAPLEX_MAX_MODEL_LEN": "8"}, "--max-model-len: must"),
        ([], {"LORAPLEX_MAX_MODEL_LEN": "8"}, "LORAPLEX_MAX_MODEL_LEN: must"),
        ([], {}, "--max-model-len: must"),
    ],
)
def test_what_a_child_refuses_is_named_as_it_was_given(
    argv: list[str], environ: dict[str, str], said: str
) -> None:
    message = "LORAPLEX_MAX_MODEL_LEN: must"
    assert named_as_given(message, [*MODEL, *argv], environ) == said
    others = "LORAPLEX_POLICY: wrong; or set LORAPLEX_AUTH=insecure"
    assert named_as_given(others, MODEL, {}) == others


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--insecure"], {}),
        (["--insecure"], {"LORAPLEX_AUTH": "keys"}),
        ([], {"LORAPLEX_AUTH": "keys"}),
        ([], {"LORAPLEX_AUTH": "insecure"}),
        ([], {"LORAPLEX_INSECURE": "1"}),
    ],
)
def test_open_host_needs_keys_or_insecure(argv: list[str], environ: dict[str, str]) -> None:
    config = parse([*MODEL, "--host", "0.0.0.0", *argv], environ)
    assert {listener.host for listener in config.listeners.values()} == {"0.0.0.0"}
    assert config.auth == environ.get("LORAPLEX_AUTH", "insecure")


def _worker(*argv: str) -> Mapping[str, str]:
    return parse([*MODEL, *argv], {}).worker


def test_limits_of_a_step_have_the_names_that_vllm_users_know() -> None:
    worker = _worker("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    assert (env.MAX_NUM_SEQS.read(worker), env.MAX_NUM_BATCHED_TOKENS.read(worker)) == (8, 64)
    assert env.LORA_DTYPE.read(_worker("--lora-dtype", "int8")) == "int8"
    worker = _worker("--max-model-len", "4096", "--gpu-memory-utilization", "0.85")
    assert env.MAX_MODEL_LEN.read(worker) == 4096
    assert env.GPU_MEMORY_UTILIZATION.read(worker) == 0.85


def test_the_arena_is_given_in_bytes_or_percent() -> None:
    assert env.KV_MEMORY.read(_worker("--kv-memory", "85%")) == Memory(share=0.85)
    assert env.KV_MEMORY.read(_worker("--kv-memory", "24MiB")) == Memory(24 << 20)
    with pytest.raises(InvalidRequest, match="LORAPLEX_KV_MEMORY"):
        parse(MODEL, {"LORAPLEX_KV_MEMORY": "120%"})
    assert env.LORA_MEMORY.read(_worker("--lora-memory", "25%")) == Memory(share=0.25)


def test_the_cache_is_kept_as_computed_or_in_codes() -> None:
    for name in ("auto", "bfloat16", "int8", "fp8"):
        assert env.KV_CACHE_DTYPE.read(_worker("--kv-cache-dtype", name)) == name
    with pytest.raises(InvalidRequest, match="--kv-cache-dtype"):
        parse([*MODEL, "--kv-cache-dtype", "int4"], {})
