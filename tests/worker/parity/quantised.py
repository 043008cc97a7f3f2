"""Tiny bases written in the layouts of quantised files, and the weights that those files mean.

The codes, scales and zero points are drawn here and packed by this module alone, so the weights
that transformers computes with owe nothing to the readers that are judged.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker.parity.bases import TinyBase, set_swiglu_limit

GROUP = 32
PLAIN_MODULES = ("layers.0.mlp.down_proj", "layers.1.self_attn.v_proj")
"""Linears that the config leaves out: one alone, and one of three that are stacked."""
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
FP4 = torch.cat((FP4, -FP4))
_IN_CODES = re.compile(
    r"^(?!.*(vision|visual)).*layers\.\d+\..*(_proj|_proj_\w+|\.w[123])\.weight$"
)
"""Linears of the text model, experts among them, but not those that are one tensor of a layer."""
Packed = tuple[dict[str, Tensor], Tensor]
"""(tensors by the end of their names, the weight they mean in float32)."""


@dataclass(frozen=True)
class Layout:
    """One way to store a base."""

    config: dict[str, Any]
    pack: Callable[[Tensor], Packed]


def _groups(num_inputs: int, size: int = GROUP) -> Tensor:
    """The group of each input."""
    return torch.arange(num_inputs) // size


def _largest(weight: Tensor, groups: Tensor) -> Tensor:
    """Largest magnitude of each group of each row."""
    size = len(weight), int(groups.max()) + 1
    index = groups.expand_as(weight)
    return torch.zeros(size).scatter_reduce(1, index, weight.abs(), "amax").clamp(min=1e-3)


def _words(codes: Tensor, bits: int) -> Tensor:
    """`[rows, n]` small integers -> int32 words along the rows, lowest bits first."""
    per_word = 32 // bits
    padding = -codes.shape[1] % per_word
    codes = torch.nn.functional.pad(codes.long(), (0, padding))
    shifts = torch.arange(per_word) * bits
    words = (codes.view(len(codes), -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _asymmetric(weight: Tensor, groups: Tensor, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, zero points, float16 scales)."""
    middle = 1 << (bits - 1)
    scales = (_largest(weight, groups) / (middle - 1)).half()
    zeros = middle + torch.arange(scales.numel()).view(scales.shape) % 3 - 1
    steps = (weight / scales.float()[:, groups]).round() + zeros[:, groups]
    return steps.clamp(0, (1 << bits) - 1).long(), zeros, scales


def _meaning(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return (codes.float() - zeros.float()[:, groups]) * scales.float()[:, groups]


def _gptq(weight: Tensor, *, in_order: bool, bits: int = 4) -> Packed:
    num_inputs = weight.shape[1]
    groups = _groups(num_inputs)
    if not in_order:
        shuffled = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
        groups = groups[shuffled]
    codes, zeros, scales = _asymmetric(weight, groups, bits)
    tensors = {
        "qweight": _words(codes, bits).T,
        "qzeros": _words((zeros - 1).T, bits),
        "scales": scales.T,
        "g_idx": groups.int(),
        "bias": torch.zeros(len(weight)).half(),
    }
    return tensors, _meaning(codes, zeros, scales, groups)


def _awq(weight: Tensor) -> Packed:
    groups = _groups(weight.shape[1])
    codes, zeros, scales = _asymmetric(weight, groups)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: Tensor) -> Tensor:
        columns = values.T.reshape(values.shape[1], -1, 8)[:, :, order]
        return _words(columns.flatten(1), 4)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.T}
    return tensors, _meaning(codes, zeros, scales, groups)


def _packed(weight: Tensor) -> Packed:
    return _words_of_inputs(weight, _groups(weight.shape[1]), 4)


def _packed8(weight: Tensor) -> Packed:
    return _words_of_inputs(weight, torch.zeros(weight.shape[1]).long(), 8)


def _words_of_inputs(weight: Tensor, groups: Tensor, bits: int) -> Packed:
    middle = 1 << (bits - 1)
    scales = (_largest(weight, groups) / (middle - 1)).bfloat16()
    codes = (weight / scales.float()[:, groups]).round().clamp(-middle, middle - 1)
    tensors = {
        "weight_packed": _words(codes + middle, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, codes * scales.float()[:, groups]


def _packed_with_zeros(weight: Tensor, bits: int = 4) -> Packed:
    groups = _groups(weight.shape[1])
    codes, zeros, scales = _asymmetric(weight, groups, bits)
    tensors = {
        "weight_packed": _words(codes, bits),
        "weight_scale": scales,
        "weight_zero_point": _words(zeros.T, bits).T,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, _meaning(codes, zeros, scales, groups)


def _int8(weight: Tensor) -> Packed:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def _bnb8(weight: Tensor) -> Packed:
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round()
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes * (largest[:, None] / 127)


def _bnb4(weight: Tensor, kind: str = "nf4", *, is_nested: bool = False) -> Packed:
    table = {"nf4": NF4, "fp4": FP4}[kind]
    flat = weight.flatten()
    blocks = _groups(len(flat), 64)
    absmax = _largest(flat[None], blocks)[0]
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
    tensors = {"weight.absmax": absmax, "weight.quant_map": table}
    if is_nested:
        nested, absmax, changes = _nested(absmax)
        tensors, state = tensors | nested, state | changes
    codes = (flat / absmax[blocks])[:, None].sub(table).abs().argmin(1)
    pairs = codes.view(-1, 2)
    tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return tensors, (table[codes] * absmax[blocks]).view(weight.shape)


def _nested(absmax: Tensor) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """(tensors, what scales in codes mean, additions to the state)."""
    table, blocks = torch.linspace(-1, 1, 256), _groups(len(absmax), 256)
    offset = absmax.mean().item()
    own = _largest(absmax[None] - offset, blocks)[0]
    codes = ((absmax - offset) / own[blocks])[:, None].sub(table).abs().argmin(1)
    tensors = {
        "weight.absmax": codes.to(torch.uint8),
        "weight.nested_absmax": own,
        "weight.nested_quant_map": table,
    }
    state = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    return tensors, table[codes] * own[blocks] + offset, state


def _float8(weight: Tensor) -> Packed:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def _one_scale(weight: Tensor, suffixes: tuple[str, str], shape: tuple[int, ...]) -> Packed:
    """`suffixes`: of the weight's scale, and of the activations', which is not used."""
    scale = weight.abs().amax() / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = {suffixes[0]: scale.view(shape), suffixes[1]: torch.full(shape, 0.01)}
    return {"weight": codes, **scales}, codes.float() * scale


def _blocks(weight: Tensor, suffix: str = "weight_scale_inv") -> Packed:
    rows, columns = _groups(len(weight)), _groups(weight.shape[1], 64)
    count = int(rows.max()) + 1, int(columns.max()) + 1
    scales = torch.zeros(count)
    for i in range(count[0]):
        scales[i] = _largest(weight[rows == i], columns).amax(0) / 448
    spread = scales[rows][:, columns]
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, suffix: scales}, codes.float() * spread


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "symmetric": True, **weights},
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(f"model.{name}" for name in PLAIN_MODULES)],
    }


_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "dynamic": {f"-:.*{re.escape(name)}": {} for name in PLAIN_MODULES},
}
_NOT = {"modules_to_not_convert": ["lm_head", *PLAIN_MODULES]}
_BNB = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head", *PLAIN_MODULES]}
LAYOUTS = {
    "ct-int8": Layout(
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), _int8
    ),
    "ct-int4": Layout(
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
        ),
        _packed,
    ),
    "ct-int4-zeros": Layout(
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
            | {"symmetric": False},
        ),
        _packed_with_zeros,
    ),
    "ct-int8-packed": Layout(
        _compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        _packed8,
    ),
    "ct-int8-packed-zeros": Layout(
        _compressed(
            "pack-quantized",
            {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP}
            | {"symmetric": False},
        ),
        lambda w: _packed_with_zeros(w, 8),
    ),
    "ct-fp8": Layout(
        _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        _float8,
    ),
    "ct-fp8-tensor": Layout(
        _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        lambda w: _one_scale(w, ("weight_scale", "input_scale"), (1,)),
    ),
    "ct-fp8-blocks": Layout(
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block"}
            | {"block_structure": [GROUP, 64]},
        ),
        lambda w: _blocks(w, "weight_scale"),
    ),
    "fp8-blocks": Layout(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        | {"weight_block_size": [GROUP, 64], **_NOT},
        _blocks,
    ),
    "fp8-tensor": Layout(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, **_NOT},
        lambda w: _one_scale(w, ("weight_scale_inv", "activation_scale"), ()),
    ),
    "gptq": Layout({**_GPTQ, "desc_act": False}, lambda w: _gptq(w, in_order=True)),
    "gptq-act-order": Layout({**_GPTQ, "desc_act": True}, lambda w: _gptq(w, in_order=False)),
    "gptq-int8": Layout(
        {**_GPTQ, "bits": 8, "desc_act": False}, lambda w: _gptq(w, in_order=True, bits=8)
    ),
    "awq": Layout(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
        | {"version": "gemm", **_NOT},
        _awq,
    ),
    "bnb-nf4": Layout({**_BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _bnb4),
    "bnb-nf4-nested": Layout(
        {
            **_BNB,
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        lambda w: _bnb4(w, is_nested=True),
    ),
    "bnb-fp4": Layout(
        {**_BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, lambda w: _bnb4(w, "fp4")
    ),
    "bnb-int8": Layout({**_BNB, "load_in_8bit": True}, _bnb8),
}


def quantised_base(base: TinyBase, layout_name: str, folder: Path) -> TinyBase:
    """A copy of a base in a layout, with the model that transformers reads from plain files of what
    the codes mean."""
    layout = LAYOUTS[layout_name]
    plain = load_file(base.folder / "model.safetensors")
    coded = dict(plain)
    for name in filter(_IN_CODES.search, plain):
        module = name.removesuffix(".weight")
        if module.endswith(PLAIN_MODULES) or len(plain[name]) % 8:
            continue
        packed, meaning = layout.pack(coded.pop(name).float())
        kept = {f"{module}.{end}": t.clone().contiguous() for end, t in packed.items()}
        coded = kept | coded  # the base's own biases replace those that writers add
        plain[name] = meaning.contiguous()
    config = json.loads((base.folder / "config.json").read_bytes())
    _write(folder, coded, {**config, "quantization_config": layout.config})
    _write(folder / "meaning", plain, config)
    model = type(base.model).from_pretrained(
        folder / "meaning",
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # as in `make_base`
    )
    set_swiglu_limit(model)
    return TinyBase(f"{base.name}-{layout_name}", folder, model.eval().requires_grad_(False))


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@torch.inference_mode()
def quantised_on_load(base: TinyBase, scheme: str) -> TinyBase:
    """A base with the model that has the weights which `--quantization` leaves."""
    model = copy.deepcopy(base.model)
    if base.is_tied:  # only the head is quantised
        head = model.lm_head.weight
        model.lm_head.weight = torch.nn.Parameter(head.clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    for name, parameter in model.named_parameters():
        in_codes = name.endswith(("_proj.weight", "_proj", ".w1", ".w2", ".w3"))
        if name == "lm_head.weight" or (scheme == "int8" and in_codes):
            parameter.copy_(_nearest(parameter, parameter.abs().amax(-1, keepdim=True) / 127))
        elif in_codes and scheme == "fp8":
            scales = parameter.abs().amax(-1, keepdim=True) / 448
            steps = (parameter / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
            parameter.copy_(steps.float() * scales)
        elif in_codes:
            for group in parameter.split(64, dim=-1):
                largest = group.gather(-1, group.abs().argmax(-1, keepdim=True))
                group.copy_(_nearest(group, (largest / -8).bfloat16().float(), -8, 7))
    return TinyBase(base.name, base.folder, model)


def _nearest(values: Tensor, scales: Tensor, low: int = -127, high: int = 127) -> Tensor:
    return (values / scales).round().clamp(low, high) * scales
