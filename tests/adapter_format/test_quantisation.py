"""What quantization_config may say: schemes that are known in full, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapter_format.geometry import geometry_from_folder
from loraplex.adapter_format.quantisation import FIELD, read_quantisation
from loraplex.errors import InvalidRequest, Unsupported
from tests.adapter_format.builders import Tensor, tensor_file

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def compressed(layout: str = "pack-quantized", **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
    }


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GPTQ, "gptq-int4-g128-asym"),
        ({**GPTQ, "group_size": -1, "bits": 8, "desc_act": True}, "gptq-int8-asym"),
        ({**GPTQ, "dynamic": {"-:.*attn.*": {}, "lm_head": {}}}, "gptq-int4-g128-asym"),
        (AWQ, "awq-int4-g128-asym"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq-int4-g64-asym"),
        (FP8, "blocks-float8-b128x128"),
        ({"quant_method": "fp8"}, "plain-float8"),
        (NF4, "bnb4-float4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb8-int8"),
        (compressed(), "packed-int4-g32"),
        (compressed(symmetric=False), "packed-int4-g32-asym"),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="channel",
                       group_size=None),
            "plain-float8",
        ),
    ],
)  # fmt: skip
def test_a_known_scheme_has_a_name(config: dict[str, Any], name: str) -> None:
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    assert quantisation.name == name


@pytest.mark.parametrize(
    ("config", "kv_cache"),
    [
        (compressed(), ""),
        ({**compressed(), "kv_cache_scheme": None}, ""),
        ({**compressed(), "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({**compressed(), "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        ({**FP8, "kv_cache_scheme": "static"}, ""),
    ],
)
def test_a_base_says_how_keys_and_values_are_kept(config: dict[str, Any], kv_cache: str) -> None:
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    assert quantisation.kv_cache == kv_cache


@pytest.mark.parametrize("nothing", [{}, {"quantization_config": None}])
def test_plain_weights_have_no_scheme(nothing: dict[str, Any]) -> None:
    assert read_quantisation(nothing) is None


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"bits": 4}, ""),
        ({"quant_method": "quark"}, ""),
        ({"quant_method": "torchao", "quant_type": {"default": {}}}, ""),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, ""),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ""),
        (["gptq"], ""),
        ({"quant_method": ["gptq"]}, ""),
        ({**compressed(), "sparsity_config": "dense"}, ".sparsity_config"),
        ({**GPTQ, "bits": 3}, ".bits"),
        ({**GPTQ, "bits": True}, ".bits"),
        ({**GPTQ, "group_size": 0}, ".group_size"),
        ({**GPTQ, "group_size": "128"}, ".group_size"),
        ({**GPTQ, "checkpoint_format": "marlin"}, ".checkpoint_format"),
        ({**GPTQ, "pack_dtype": "int16"}, ".pack_dtype"),
        ({**GPTQ, "dynamic": {"-:o_proj": {}, "+:q_proj": {"bits": 8}}}, ".dynamic"),
        ({**GPTQ, "dynamic": {"q_proj": {"group_size": 64}}}, ".dynamic"),
        ({**GPTQ, "dynamic": ["-:.*attn.*"]}, ".dynamic"),
        ({**GPTQ, "rotation": "hadamard"}, ".rotation"),
        ({**AWQ, "version": "gemv"}, ".version"),
        ({**AWQ, "zero_point": False}, ".zero_point"),
        ({**AWQ, "backend": "llm-awq"}, ".backend"),
        ({**FP8, "fmt": "e5m2"}, ".fmt"),
        ({**FP8, "weight_block_size": [128]}, ".weight_block_size"),
        ({**FP8, "weight_block_size": [128, 0]}, ".weight_block_size"),
        ({**NF4, "load_in_8bit": True}, ".load_in_4bit"),
        ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, ".bnb_4bit_quant_storage"),
        (compressed("nvfp4-pack-quantized"), ".format"),
        (compressed("mxfp4-pack-quantized"), ".format"),
        (compressed("mxfp8-quantized", type="float", num_bits=8), ".format"),
        (compressed(num_bits=2), ".config_groups.group_0.weights.num_bits"),
        (compressed(strategy="tensor_group"), ".config_groups.group_0.weights.strategy"),
        (compressed(strategy="channel"), ".config_groups.group_0.weights.group_size"),
        (compressed(dynamic=True), ".config_groups.group_0.weights.dynamic"),
        (compressed("int-quantized"), ".config_groups.group_0.weights.num_bits"),
        (compressed(type="float", num_bits=8), ".config_groups.group_0.weights.type"),
        ({**compressed(), "config_groups": {}}, ".config_groups"),
        ({**compressed(), "config_groups": {"a": {"targets": ["Linear"]}}}, ".config_groups.a"),
        ({**compressed(), "kv_cache_scheme": {"num_bits": 4}}, ".kv_cache_scheme.num_bits"),
        ({**compressed(), "kv_cache_scheme": ["fp8"]}, ".kv_cache_scheme"),
        ({**compressed(), "transform_config": {"R1": {}}}, ".transform_config"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24"}}, ".sparsity_config"),
    ],
)
def test_what_is_unknown_or_known_in_part_is_refused_by_name(config: object, key: str) -> None:
    with pytest.raises(Unsupported) as caught:
        read_quantisation({"quantization_config": config})
    assert caught.value.violations[0].field == FIELD + key


def test_groups_of_compressed_tensors_choose_by_name_before_class() -> None:
    config = compressed()
    eight = {**WEIGHTS, "num_bits": 8}
    config["config_groups"]["group_1"] = {"targets": ["re:.*down_proj"], "weights": eight}
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    bits = {
        module: scheme.bits
        for module in ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
        if (scheme := quantisation.scheme_of(module)) is not None
    }
    assert list(bits.values()) == [4, 8]


BASE = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 16}
EMBEDDING = {"model.embed_tokens.weight": Tensor("F16", (16, 64))}
WORDS = {"model.layers.0.mlp.up_proj.qweight": Tensor("I32", (8, 24))}


def write(folder: Path, config: object, tensors: dict[str, Tensor]) -> Path:
    text = json.dumps({**BASE, "quantization_config": config})
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").write_bytes(tensor_file({**EMBEDDING, **tensors}))
    return folder


def test_a_quantised_linear_has_the_shape_of_its_weight(tmp_path: Path) -> None:
    geometry = geometry_from_folder(write(tmp_path, GPTQ, WORDS))
    [linear] = [module for module in geometry.modules if module.kind == "linear"]
    assert (linear.in_features, linear.out_features) == (64, 24)


def test_the_scheme_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    first = geometry_from_folder(write(tmp_path, GPTQ, WORDS))
    second = geometry_from_folder(write(tmp_path, {**GPTQ, "group_size": 32}, WORDS))
    assert first.modules == second.modules
    assert first.fingerprint != second.fingerprint


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("config", "tensors", "field"),
    [
        (None, WORDS, f"{UP}.qweight"),
        (NF4, WORDS, f"{UP}.qweight"),
        (None, {f"{UP}.weight": Tensor("I8", (24, 64))}, f"{UP}.weight"),
        (FP8, {f"{UP}.weight": Tensor("F8_E4M3", (24, 64))}, f"{UP}.weight"),
        (NF4, {f"{UP}.weight": Tensor("U8", (768, 1))}, f"{UP}.weight"),
        (compressed(), {f"{UP}.weight_packed": Tensor("I32", (24, 8))}, f"{UP}.weight_shape"),
    ],
)
def test_codes_that_the_config_does_not_explain_are_named(
    config: object, tensors: dict[str, Tensor], field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        geometry_from_folder(write(tmp_path, config, tensors))
    assert caught.value.violations[0].field == field


def test_an_unknown_method_is_refused_before_the_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        geometry_from_folder(write(tmp_path, {"quant_method": "quark"}, {}))
    assert caught.value.violations[0].field == FIELD
