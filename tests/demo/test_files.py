"""The committed base and adapters, read without torch: dtypes, sizes, and what they vary."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from demo.skills import SKILLS

DEMO = Path(__file__).parents[2] / "demo"
WEIGHTS = sorted(DEMO.rglob("*.safetensors"))
MAX_WEIGHT_BYTES = 12_000_000


def tensor_infos(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> {dtype, shape, data_offsets}, from the header alone."""
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return header


def adapter_configs() -> dict[str, dict[str, Any]]:
    return {
        path.parent.name: json.loads(path.read_text())
        for path in (DEMO / "adapters").glob("*/adapter_config.json")
    }


def base_config() -> dict[str, Any]:
    return json.loads((DEMO / "base" / "config.json").read_text())


def test_there_is_one_adapter_for_every_skill_and_at_least_eight() -> None:
    assert adapter_configs().keys() == SKILLS.keys()
    assert len(SKILLS) >= 8


@pytest.mark.parametrize("path", WEIGHTS, ids=lambda path: path.parent.name)
def test_every_tensor_is_float16(path: Path) -> None:
    infos = tensor_infos(path)
    assert infos
    assert {info["dtype"] for info in infos.values()} == {"F16"}


def test_all_weights_together_stay_under_twelve_megabytes() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS) < MAX_WEIGHT_BYTES


def test_the_base_is_a_small_llama_with_grouped_query_attention() -> None:
    config = base_config()
    tensors = tensor_infos(DEMO / "base" / "model.safetensors").values()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 256
    assert 1e6 <= sum(math.prod(info["shape"]) for info in tensors) <= 4e6


def test_no_task_token_of_the_pre_training_is_left_in_the_base() -> None:
    embedding = tensor_infos(DEMO / "base" / "model.safetensors")["model.embed_tokens.weight"]
    assert embedding["shape"] == [base_config()["vocab_size"], base_config()["hidden_size"]]
    assert base_config()["vocab_size"] == 264


def test_adapters_vary_what_peft_varies() -> None:
    configs = adapter_configs().values()
    assert {4, 8, 16, 32} <= {config["r"] for config in configs}
    targets = [frozenset(config["target_modules"]) for config in configs]
    assert frozenset({"q_proj", "v_proj"}) in targets
    assert max(map(len, targets)) == 7, "an adapter on all linear layers"
    assert sum(config["use_rslora"] for config in configs) == 1
    assert sum(config["use_dora"] for config in configs) == 1
    assert any(config["rank_pattern"] and config["alpha_pattern"] for config in configs)
    assert any(config["layers_to_transform"] for config in configs)


def test_adapters_name_the_base_by_its_id_and_hold_no_other_files() -> None:
    for name, config in adapter_configs().items():
        assert config["base_model_name_or_path"] == "loraplex-demo"
        files = {path.name for path in (DEMO / "adapters" / name).iterdir()}
        assert files == {"adapter_config.json", "adapter_model.safetensors"}


def test_the_readme_holds_the_table_of_every_adapter() -> None:
    readme = (DEMO / "README.md").read_text()
    assert all(f"| `{name}` |" in readme for name in SKILLS)
