"""A worker's settings."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest, LoraplexError
from loraplex_services.common.security.addresses import is_local
from loraplex_services.worker.config import MAX_RESIDENT, base_id_of, from_env
from loraplex_services.worker.types.nodes import Nodes

GOOD = {"LORAPLEX_MODEL": "org/model", "LORAPLEX_OBJECTS": "file:///objects"}
NODES = {
    "LORAPLEX_TENSOR_PARALLEL": "4",
    "LORAPLEX_NNODES": "2",
    "LORAPLEX_MASTER_ADDR": "worker-0:29500",
}


def test_by_default_only_this_machine_can_connect() -> None:
    config = from_env(GOOD)
    assert is_local(config.listen) and config.base_id == "org/model"
    assert config.engine.max_loras is None and config.worker_id.startswith(socket.gethostname())


def test_reading_settings_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert from_env(GOOD).cache_dir is None
    assert list(tmp_path.iterdir()) == []


def test_a_worker_is_named_after_its_socket() -> None:
    one = from_env({**GOOD, "LORAPLEX_WORKER_LISTEN": "unix:/run/loraplex/worker-3.sock"})
    assert one.worker_id == "worker-3"


def test_workers_of_one_host_have_different_names() -> None:
    assert from_env(GOOD).worker_id != from_env(GOOD).worker_id


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"LORAPLEX_MODEL": ""}, "LORAPLEX_MODEL"),
        ({"LORAPLEX_MODEL": "s3://"}, "LORAPLEX_MODEL"),
        ({"LORAPLEX_OBJECTS": ""}, "LORAPLEX_OBJECTS"),
        ({"LORAPLEX_TENSOR_PARALLEL": "0"}, "LORAPLEX_TENSOR_PARALLEL"),
        ({"LORAPLEX_NODE_RANK": "1"}, "LORAPLEX_NODE_RANK"),
        ({**NODES, "LORAPLEX_NODE_RANK": "2"}, "LORAPLEX_NODE_RANK"),
        ({**NODES, "LORAPLEX_TENSOR_PARALLEL": "3"}, "LORAPLEX_NNODES"),
        ({**NODES, "LORAPLEX_MASTER_ADDR": ""}, "LORAPLEX_MASTER_ADDR"),
        ({**NODES, "LORAPLEX_MASTER_ADDR": "worker-0:0"}, "LORAPLEX_MASTER_ADDR"),
        ({**NODES, "LORAPLEX_MASTER_ADDR": "unix:/run/ranks"}, "LORAPLEX_MASTER_ADDR"),
        (NODES, "LORAPLEX_SERVICE_TOKEN_FILE"),
        ({"LORAPLEX_WORKER_LISTEN": "0.0.0.0:50053"}, "LORAPLEX_WORKER_LISTEN"),
        ({"LORAPLEX_SERVICE_TOKEN_FILE": "/nowhere"}, "LORAPLEX_SERVICE_TOKEN_FILE"),
        ({"LORAPLEX_DEBUG": "overlap=maybe"}, "LORAPLEX_DEBUG"),
        ({"LORAPLEX_SERVED_MODEL_NAME": "my base"}, "LORAPLEX_SERVED_MODEL_NAME"),
        ({"LORAPLEX_MODEL": "/models/模型"}, "LORAPLEX_SERVED_MODEL_NAME"),
    ],
)
def test_a_bad_value_names_its_variable(changes: dict[str, str], named: str) -> None:
    with pytest.raises(LoraplexError) as caught:
        from_env({**GOOD, **changes})
    assert [violation.field for violation in caught.value.violations] == [named]


def test_listening_beyond_loopback_needs_a_token_or_consent(tmp_path: Path) -> None:
    beyond = {**GOOD, "LORAPLEX_WORKER_LISTEN": "0.0.0.0:50053"}
    with pytest.raises(InvalidRequest):
        from_env(beyond)
    (tmp_path / "token").write_text("secret\n")
    token_file = {"LORAPLEX_SERVICE_TOKEN_FILE": str(tmp_path / "token")}
    assert from_env({**beyond, **token_file}).service_token == "secret"
    assert from_env({**beyond, "LORAPLEX_AUTH": "insecure"}).service_token == ""


@pytest.mark.hostile
def test_a_worker_that_anybody_on_the_machine_could_use_does_not_start_with_keys_on(
    tmp_path: Path,
) -> None:
    keys = {**GOOD, "LORAPLEX_AUTH": "keys"}
    with pytest.raises(InvalidRequest, match="LORAPLEX_SERVICE_TOKEN_FILE"):
        from_env(keys)
    (tmp_path / "token").write_text("secret\n")
    from_env({**keys, "LORAPLEX_SERVICE_TOKEN_FILE": str(tmp_path / "token")})
    from_env({**keys, "LORAPLEX_WORKER_LISTEN": f"unix:{tmp_path}/socket"})


def test_the_base_is_named_after_hub_id_or_folder(tmp_path: Path) -> None:
    (tmp_path / "my-base").mkdir()
    assert base_id_of(str(tmp_path / "my-base")) == "my-base"
    assert base_id_of(f"{tmp_path}/my-base/") == "my-base"
    assert base_id_of("org/model") == "org/model"


def test_the_base_is_named_after_a_link_and_not_after_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshot" / "inner").mkdir(parents=True)
    (tmp_path / "0a1b2c").touch()
    (tmp_path / "my-base").symlink_to("snapshot")
    (tmp_path / "other.gguf").symlink_to("0a1b2c")
    assert base_id_of(str(tmp_path / "my-base")) == "my-base"
    assert base_id_of(str(tmp_path / "other.gguf")) == "other"
    monkeypatch.chdir(tmp_path / "snapshot" / "inner")
    assert (base_id_of("."), base_id_of("..")) == ("inner", "snapshot")


def test_a_base_under_another_name_is_known_by_its_default_name_too(tmp_path: Path) -> None:
    renamed = {**GOOD, "LORAPLEX_SERVED_MODEL_NAME": "ours"}
    assert from_env(renamed).base_aliases == ("org/model",)
    (folder := tmp_path / "trained-on").mkdir()
    assert from_env({**renamed, "LORAPLEX_MODEL": str(folder)}).base_aliases == ("trained-on",)
    assert from_env(GOOD).base_aliases == ()


@pytest.mark.parametrize("name", ["model", "checkpoint-100", "Final_Model", "global_step_20"])
def test_a_folder_that_any_model_may_be_in_does_not_name_the_base(
    tmp_path: Path, name: str
) -> None:
    (folder := tmp_path / name).mkdir()
    settings = {**GOOD, "LORAPLEX_MODEL": str(folder)}
    assert from_env({**settings, "LORAPLEX_SERVED_MODEL_NAME": "ours"}).base_aliases == ()
    assert from_env(settings).base_id == name


@pytest.mark.parametrize(
    ("text", "expected"), [(None, (0, 1.0)), ("25%", (0, 0.25)), ("24MiB", (24 << 20, 1.0))]
)
def test_the_share_of_adapters_is_given_in_bytes_or_percent(
    text: str | None, expected: tuple[int, float]
) -> None:
    engine = from_env(GOOD | ({"LORAPLEX_LORA_MEMORY": text} if text else {})).engine
    assert (engine.lora_bytes, engine.lora_share) == expected


def test_clustering_is_off_unless_a_size_is_given() -> None:
    assert from_env(GOOD).engine.cluster_size == 0
    assert from_env({**GOOD, "LORAPLEX_CLUSTER_SIZE": "8"}).engine.cluster_size == 8
    with pytest.raises(InvalidRequest, match="LORAPLEX_CLUSTER_SIZE"):
        from_env({**GOOD, "LORAPLEX_CLUSTER_SIZE": "0"})


def test_a_request_may_not_name_more_adapters_than_a_step_holds() -> None:
    assert from_env({**GOOD, "LORAPLEX_MAX_LORAS": "3"}).max_request_adapters == 3
    assert from_env(GOOD).max_request_adapters == MAX_RESIDENT // 2


def test_a_machine_of_several_knows_its_ranks_and_the_secret(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("new\nold\n")
    config = from_env(
        {
            **(GOOD | NODES),
            "LORAPLEX_NODE_RANK": "1",
            "LORAPLEX_SERVICE_TOKEN_FILE": str(tmp_path / "token"),
        }
    )
    assert config.node_rank == 1
    assert config.engine.nodes == Nodes(2, "worker-0:29500", "new\nold")
    assert config.engine.nodes.num_local(config.engine.tensor_parallel) == 2
