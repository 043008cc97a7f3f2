"""Weights that the libraries of the formats packed are what those libraries unpack."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from loraplex.adapter_format.geometry import geometry_from_folder
from loraplex.adapter_format.quantisation import read_quantisation
from loraplex.errors import InvalidRequest
from loraplex_services.worker.model.load import Checkpoint
from loraplex_services.worker.model.quantised import QuantisedCheckpoint

GOLDEN = sorted(Path(__file__).with_name("golden").glob("*.safetensors"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def golden(request):
    """(tensors of the files, what the library unpacks, its quantization_config)."""
    tensors = load_file(request.param)
    with safe_open(request.param, "pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    return tensors, tensors.pop("expected"), config


def write(folder, tensors, config):

    save_file(tensors, folder / "model.safetensors")
    base = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 8}
    (folder / "config.json").write_text(json.dumps({**base, "quantization_config": config}))
    return folder


def test_every_format_has_a_file_of_its_library():
    assert len(GOLDEN) == 15


def test_a_weight_is_what_its_library_unpacks(golden, tmp_path):
    tensors, expected, config = golden
    folder = write(tmp_path, tensors, config)
    quantisation = read_quantisation({"quantization_config": config})
    files = Checkpoint(folder, torch.float32, torch.device("cpu"))
    weight = QuantisedCheckpoint(files, quantisation).take("linear.weight", expected.shape)
    files.finish()
    error = (weight - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= {torch.float16: 2**-11, torch.bfloat16: 2**-8}.get(expected.dtype, 1e-7)


def test_the_geometry_knows_its_shape(golden, tmp_path):
    tensors, expected, config = golden
    tensors["embed_tokens.weight"] = torch.zeros(8, 64)
    geometry = geometry_from_folder(write(tmp_path, tensors, config))
    [linear] = [module for module in geometry.modules if module.kind == "linear"]
    assert (linear.name, linear.out_features, linear.in_features) == ("linear", *expected.shape)
    assert not linear.has_bias


def _read(folder, name, shape=(32, 64)):
    config = json.loads((folder / "config.json").read_bytes())
    files = Checkpoint(folder, torch.float32, torch.device("cpu"))
    return QuantisedCheckpoint(files, read_quantisation(config)).take(name, shape)


@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    [
        ("gptq-int4", "linear.qzeros", None),
        ("gptq-int4", "linear.scales", None),
        ("gptq-int4", "linear.scales", lambda t: t * float("inf")),
        ("gptq-int4", "linear.scales", lambda t: t.int()),
        ("gptq-int4", "linear.scales", lambda t: t[:1]),
        ("gptq-int4-act-order", "linear.g_idx", lambda t: t.clamp(max=0)),
        ("gptq-int4-act-order", "linear.g_idx", lambda t: t + 1),
        ("gptq-int4-act-order", "linear.g_idx", lambda t: t - 1),
        ("awq-int4", "linear.qweight", lambda t: t[:32]),
        ("awq-int4", "linear.scales", None),
        ("awq-int4", "linear.scales", torch.zeros_like),
        ("ct-int4-group", "linear.weight_shape", lambda t: t.flip(0)),
        ("ct-int4-group", "linear.weight_scale", None),
        ("ct-int4-group", "linear.weight_scale", lambda t: t.view(-1, 1).repeat(1, 2)),
        ("ct-int4-group", "linear.weight_scale", torch.zeros_like),
        ("ct-int4-group-asymmetric", "linear.weight_zero_point", None),
        ("ct-int8-channel", "linear.weight_scale", lambda t: t[:7]),
        ("ct-int8-channel", "linear.weight_scale", lambda t: t * float("nan")),
        ("ct-int8-channel", "linear.weight", lambda t: t.to(torch.float8_e4m3fn)),
        ("ct-fp8-channel", "linear.weight", lambda t: (t.float() * float("nan")).to(t.dtype)),
        ("ct-fp8-tensor", "linear.weight_scale", None),
        ("ct-fp8-tensor", "linear.weight_scale", torch.zeros_like),
        ("fp8-blocks", "linear.weight_scale_inv", lambda t: t.repeat(2, 1)),
        ("fp8-blocks", "linear.weight_scale_inv", lambda t: t * float("nan")),
        ("fp8-blocks", "linear.weight_scale_inv", lambda t: t.to(torch.uint8)),
        ("bnb-nf4", "linear.weight.absmax", lambda t: t[1:]),
        ("bnb-nf4", "linear.weight.absmax", lambda t: t / 0),
        ("bnb-nf4", "linear.weight.quant_map", lambda t: t * float("nan")),
        ("bnb-nf4-nested", "linear.weight.nested_absmax", lambda t: t * float("nan")),
        ("bnb-nf4-nested", "linear.weight.nested_quant_map", None),
        ("bnb-nf4", "linear.weight.quant_state.bitsandbytes__nf4", lambda t: t[:9]),
        ("bnb-int8", "linear.weight_format", lambda t: t + 1),
        ("bnb-int8", "linear.SCB", None),
        ("bnb-int8", "linear.SCB", torch.zeros_like),
    ],
)
def test_a_damaged_tensor_is_refused_by_name(name, tensor, change, tmp_path):
    path = Path(__file__).with_name("golden") / f"{name}.safetensors"
    tensors = load_file(path)
    if change is None:
        del tensors[tensor]
    else:
        tensors[tensor] = change(tensors[tensor]).contiguous()
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    with pytest.raises(InvalidRequest) as caught:
        _read(write(tmp_path, tensors, config), "linear.weight")
    assert caught.value.violations[0].field == tensor


@pytest.mark.parametrize(
    ("name", "change", "tensor"),
    [
        ("gptq-int4", lambda c: c.update(group_size=16), "linear.qzeros"),
        ("gptq-int4", lambda c: c.update(bits=8), "linear.qweight"),
        ("awq-int4", lambda c: c.update(group_size=16), "linear.qzeros"),
        (
            "ct-int4-group",
            lambda c: c["config_groups"]["group_0"]["weights"].update(group_size=16),
            "linear.weight_scale",
        ),
        ("fp8-blocks", lambda c: c.update(weight_block_size=[8, 8]), "linear.weight_scale_inv"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors_is_refused_by_name(name, change, tensor, tmp_path):
    path = Path(__file__).with_name("golden") / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    change(config)
    with pytest.raises(InvalidRequest) as caught:
        _read(write(tmp_path, load_file(path), config), "linear.weight")
    assert caught.value.violations[0].field == tensor


def test_an_act_order_that_is_used_in_part_is_refused(tmp_path):
    path = Path(__file__).with_name("golden") / "ct-int4-group.safetensors"
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    tensors = load_file(path)
    for groups, is_served in (([-1] * 64, True), ([-1] + [0] * 63, False), ([99] * 64, False)):
        tensors["linear.weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
        folder = write(tmp_path, tensors, config)
        if is_served:
            assert _read(folder, "linear.weight").isfinite().all()
            continue
        with pytest.raises(InvalidRequest) as caught:
            _read(folder, "linear.weight")
        assert caught.value.violations[0].field == "linear.weight_g_idx"


@pytest.mark.parametrize(("kind", "num_bytes"), [("Q8_0", 34 * 8), ("Q4_0", 18 * 8), ("Q4_K", 144)])
@pytest.mark.parametrize("scale", [0x7E00, 0x7C00, 0])
def test_blocks_of_gguf_without_a_usable_scale_are_refused(kind, num_bytes, scale, tmp_path):
    """Not a number, infinite, and zero in all blocks; in the K types, the scales of scales."""
    blocks = torch.full((4, num_bytes), 7, dtype=torch.uint8)
    starts = range(0, num_bytes, num_bytes if kind == "Q4_K" else num_bytes // 8)
    for start in (at + offset for at in starts for offset in ((0, 2) if kind == "Q4_K" else (0,))):
        blocks[:, start], blocks[:, start + 1] = scale & 0xFF, scale >> 8
    config = {"quant_method": "gguf", "tensor_types": {kind: ["linear"]}}
    with pytest.raises(InvalidRequest) as caught:
        _read(write(tmp_path, {"linear.weight": blocks}, config), "linear.weight", (4, 256))
    assert caught.value.violations[0].field == "linear.weight"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0"])
def test_blocks_of_gguf_are_what_the_gguf_library_makes_of_them(kind, tmp_path):
    """Random bytes: every code, scale and offset, also groups whose scale is zero."""
    type_of = gguf.GGMLQuantizationType[kind]
    num_inputs, num_bytes = gguf.GGML_QUANT_SIZES[type_of]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (8, 512 // num_inputs, num_bytes), np.uint8)
    factors = rng.uniform(0.5, 1, (8, 512 // num_inputs, 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[..., 208:] = factors[..., :2]
    else:
        blocks[..., : 4 if kind in ("Q4_K", "Q5_K") else 2] = (
            factors if kind in ("Q4_K", "Q5_K") else factors[..., :2]
        )
    if kind in ("Q4_K", "Q5_K"):
        blocks[:4, 0, 4] &= 192
    rows = blocks.reshape(8, -1)
    expected = torch.from_numpy(gguf.quants.dequantize(rows, type_of))
    config = {"quant_method": "gguf", "tensor_types": {kind: ["linear"]}}
    folder = write(tmp_path, {"linear.weight": torch.from_numpy(rows)}, config)
    found = _read(folder, "linear.weight", (8, 512))
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-23 * float(expected.max()))
