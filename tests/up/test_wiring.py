"""Each child gets the variables that wire it to the others."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest
from loraplex_services.common.settings import env, switches, variables
from loraplex_services.common.units import Memory
from loraplex_services.up.flags import LISTENERS, Listener, parse
from loraplex_services.up.state import StateDir
from loraplex_services.up.wiring import Addresses, ChildSpec, addresses_of, child_specs

BASE = str(Path(__file__).parents[2] / "demo" / "base")
ADDRESSES = Addresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    held = StateDir(tmp_path / "s")
    yield held
    held.release()


def _specs(
    state: StateDir, argv: list[str], environ: dict[str, str], addresses: Addresses = ADDRESSES
) -> dict[str, ChildSpec]:
    config = parse(["--model", BASE, *argv], environ)
    return {spec.name: spec for spec in child_specs(config, addresses, state, environ)}


def test_gateway_drains_before_workers_before_registry(state: StateDir) -> None:
    assert list(_specs(state, ["--workers", "2"], {})) == [
        "gateway",
        "worker-0",
        "worker-1",
        "registry",
    ]


def test_children_find_each_other(state: StateDir) -> None:
    specs = _specs(state, ["--workers", "2"], {})
    listens = [specs[f"worker-{i}"].environ["LORAPLEX_WORKER_LISTEN"] for i in (0, 1)]
    assert all(listen.startswith("unix:/") for listen in listens)
    assert env.WORKERS.read(specs["gateway"].environ) == tuple(listens)
    assert specs["gateway"].environ["LORAPLEX_REGISTRY_ADDRESS"] == "127.0.0.1:3"
    assert specs["registry"].environ["LORAPLEX_REGISTRY_LISTEN"] == "127.0.0.1:3"
    objects = {spec.environ["LORAPLEX_OBJECTS"] for spec in specs.values()}
    assert objects == {f"file://{state.objects}"}
    assert switches.REPLACE_BASES.read(specs["gateway"].environ)


def test_every_wired_variable_is_known_and_legal(state: StateDir) -> None:
    for spec in _specs(state, ["--kv-memory", "24MiB"], {}).values():
        assert variables.unknown_variables(spec.environ) == []
        for setting in env.ALL_SETTINGS:
            setting.read(spec.environ)


def test_flags_and_variables_reach_the_worker(state: StateDir) -> None:
    given = {"LORAPLEX_DEVICE": "cpu", "LORAPLEX_MAX_LORAS": "9"}
    argv = ["--kv-memory", "24MiB", "--dtype", "float32", "--max-loras", "3", "--drain-s", "2.5"]
    argv += ["--attention-backend", "vanilla", "--model-impl", "transformers"]
    argv += ["--served-model-name", "tiny", "--fully-sharded-loras", "--cluster-size", "8"]
    environ = _specs(state, argv, given)["worker-0"].environ
    assert env.FULLY_SHARDED_LORAS.read(environ) and env.DEVICE.read(environ) == "cpu"
    assert env.MODEL.read(environ) == BASE
    assert env.SERVED_MODEL_NAME.read(environ) == "tiny"
    assert env.KV_MEMORY.read(environ) == Memory(24 << 20)
    assert env.DTYPE.read(environ) == "float32"
    assert env.MAX_LORAS.read(environ) == 3
    assert env.CLUSTER_SIZE.read(environ) == 8
    assert env.ATTENTION_BACKEND.read(environ) == "vanilla"
    assert env.MODEL_IMPL.read(environ) == "transformers"
    assert env.DRAIN_S.read(environ) == 2.5


def test_other_stores_and_credentials_pass_through(state: StateDir) -> None:
    given = {"LORAPLEX_OBJECTS": "s3://b/p", "AWS_ACCESS_KEY_ID": "k", "PYTHONPATH": "/mine"}
    for spec in _specs(state, [], given).values():
        assert spec.environ["LORAPLEX_OBJECTS"] == "s3://b/p"
        assert not switches.REPLACE_BASES.read(spec.environ)
        assert spec.environ["AWS_ACCESS_KEY_ID"] == "k"
        assert spec.environ["PYTHONPATH"].endswith(":/mine")


@pytest.mark.parametrize(("given", "ports"), [("9", "9 10 11 12"), ("0", "0 0 0 0")])
def test_every_child_has_a_metrics_port_of_its_own(state: StateDir, given: str, ports: str) -> None:
    specs = _specs(state, ["--workers", "2"], {"LORAPLEX_METRICS_LISTEN": f"127.0.0.1:{given}"})
    listens = [env.METRICS_LISTEN.read(spec.environ) for spec in specs.values()]
    assert listens == [f"127.0.0.1:{port}" for port in ports.split()]


def test_metrics_ports_end_where_ports_do(state: StateDir) -> None:
    with pytest.raises(InvalidRequest, match="65534 to 65536"):
        _specs(state, [], {"LORAPLEX_METRICS_LISTEN": "127.0.0.1:65534"})


def test_keys_come_with_a_private_service_token(state: StateDir) -> None:
    for _ in range(2):
        specs = _specs(state, [], {"LORAPLEX_AUTH": "keys"})
    tokens = {spec.environ["LORAPLEX_SERVICE_TOKEN_FILE"] for spec in specs.values()}
    [token] = tokens
    assert stat.S_IMODE(Path(token).stat().st_mode) == 0o600
    assert len(Path(token).read_text()) > 32


def test_open_host_is_dialled_over_loopback(state: StateDir) -> None:
    listeners = {flag: Listener("0.0.0.0", 1 + index) for index, flag in enumerate(LISTENERS)}
    specs = _specs(state, ["--insecure"], {}, addresses_of(listeners))
    assert specs["registry"].environ["LORAPLEX_REGISTRY_LISTEN"] == "0.0.0.0:3"
    assert specs["gateway"].environ["LORAPLEX_REGISTRY_ADDRESS"] == "127.0.0.1:3"
    assert specs["gateway"].health == "127.0.0.1:2"
