"""Weights that the libraries of the formats packed are what those libraries unpack."""

from __future__ import annotations

import json
from pathlib import Path

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
        ("gptq-int4", "linear.scales", lambda t: t[:1]),
        ("gptq-int4-act-order", "linear.g_idx", lambda t: t.clamp(max=0)),
        ("gptq-int4-act-order", "linear.g_idx", lambda t: t + 1),
        ("awq-int4", "linear.qweight", lambda t: t[:32]),
        ("ct-int4-group", "linear.weight_shape", lambda t: t.flip(0)),
        ("ct-int4-group-asymmetric", "linear.weight_zero_point", None),
        ("ct-int8-channel", "linear.weight_scale", lambda t: t[:7]),
        ("ct-int8-channel", "linear.weight", lambda t: t.to(torch.float8_e4m3fn)),
        ("fp8-blocks", "linear.weight_scale_inv", lambda t: t.repeat(2, 1)),
        ("bnb-nf4", "linear.weight.absmax", lambda t: t[1:]),
        ("bnb-nf4-nested", "linear.weight.nested_quant_map", None),
        ("bnb-nf4", "linear.weight.quant_state.bitsandbytes__nf4", lambda t: t[:9]),
        ("bnb-int8", "linear.weight_format", lambda t: t + 1),
        ("bnb-int8", "linear.SCB", None),
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
