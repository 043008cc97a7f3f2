"""TensorRT-LLM's LoraWeights and LoraConfig: two .npy files, there and back.

`model.lora_weights.npy` is `[1, rows, width]`: for each module of each layer A `[rank, in]`, then B
`[out, rank]` with the scale folded in, both flattened, then zeros up to the widest row.
`model.lora_config.npy` is int32 `[1, rows, 3]`: module id, layer, rank. Module ids and which
projection each means are those of TensorRT-LLM's own converter and loader: `mlp_h_to_4h` (5) is
`gate_proj` and `mlp_gate` (7) is `up_proj`, which its prose describes the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from loraplex.adapter_format import Geometry, Report
from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TENSOR_FILE
from loraplex.errors import InvalidAdapter, InvalidRequest, Violation
from loraplex.rewriting.merging import scaled_by_one, tensor_name
from loraplex.rewriting.tensors import Array, Opened, new_folder, write_adapter

WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"
DTYPES = {"F16": "<f2", "F32": "<f4"}

MODULE_IDS = {
    "self_attn.qkv_proj": 0,
    "self_attn.q_proj": 1,
    "self_attn.k_proj": 2,
    "self_attn.v_proj": 3,
    "self_attn.o_proj": 4,
    "mlp.gate_proj": 5,
    "mlp.down_proj": 6,
    "mlp.up_proj": 7,
}
_NAMES = {number: name for name, number in MODULE_IDS.items()}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PLACE = re.compile(r"(.+\.layers)\.(\d+)\.(\w+\.\w+)", re.ASCII)


def is_trtllm(folder: Path) -> bool:
    """Whether a folder holds the two files."""
    return (folder / WEIGHTS_FILE).is_file() and (folder / CONFIG_FILE).is_file()


def to_trtllm(adapter: Opened, out: Path, dtype: str = "F16") -> int:
    """Write an adapter as TensorRT-LLM takes it; returns the number of rows.

    Raises:
        InvalidAdapter: it adapts something that the format has no id for.
    """
    rows = []
    config = []
    for module in sorted(adapter.report.modules, key=_place):
        _, layer, number = _place(module)
        assert module.a is not None and module.b is not None, "a linear's pair, checked by _place"
        b = adapter.tensor(module.b) * np.float32(module.scale)
        rows.append(np.concatenate([adapter.tensor(module.a).reshape(-1), b.reshape(-1)]))
        config.append([number, layer, module.rank])
    width = max(row.size for row in rows)
    weights = np.zeros((1, len(rows), width), DTYPES[dtype])
    for index, row in enumerate(rows):
        with np.errstate(over="ignore"):
            weights[0, index, : row.size] = row
    if not np.isfinite(weights).all():
        description = "has values that float16 cannot hold; use --dtype float32"
        raise InvalidAdapter.of([Violation.of(TENSOR_FILE, dtype, description)])
    with new_folder(out) as partial:
        np.save(partial / WEIGHTS_FILE, weights, allow_pickle=False)
        np.save(partial / CONFIG_FILE, np.asarray([config], np.int32), allow_pickle=False)
    return len(rows)


def from_trtllm(
    folder: Path, out: Path, geometry: Geometry, base_id: str = "", dtype: str = "F16"
) -> Report:
    """Write the PEFT folder of TensorRT-LLM's two files, whose scale is folded into B.

    Args:
        geometry: the base: the files do not say how wide A and B are.
        base_id: for `base_model_name_or_path`.

    Raises:
        InvalidAdapter: naming the row that is wrong, or does not fit the base.
    """
    weights, config = _read(folder)
    bases = {module.name: module for module in geometry.modules}
    places = {}
    for name in bases:
        match = _PLACE.fullmatch(name)
        if match:
            places[int(match[2]), match[3]] = name
    tensors: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    for index, (number, layer, rank) in enumerate(config.tolist()):
        where = f"{CONFIG_FILE}:[{index}]"
        names = _modules(number, layer, places, where)
        in_features = bases[names[0]].in_features
        widths = [bases[name].out_features for name in names]
        a, b = _matrices(weights[index], rank, in_features, sum(widths), where)
        begin = 0
        for name, width in zip(names, widths, strict=True):
            if name in ranks:
                _refuse(where, name, "is adapted by an earlier row already")
            tensors[tensor_name(name, "A")] = a
            tensors[tensor_name(name, "B")] = b[begin : begin + width]
            ranks[name] = rank
            begin += width
    peft = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_id or None,
        "target_modules": sorted(ranks),
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": 0.0,
    }
    return write_adapter(out, {**peft, **scaled_by_one(ranks)}, tensors, dtype, geometry)


def _place(module: AdapterModule) -> tuple[str, int, int]:
    """(prefix, layer, module id). Raises InvalidAdapter where there is none."""
    match = _PLACE.fullmatch(module.name)
    number = MODULE_IDS.get(match[3]) if match else None
    for part in ("magnitude", "lora_bias", "token_delta", "full", "base_copy", "bias"):
        info = getattr(module, part)
        if info is not None:
            _refuse(f"{TENSOR_FILE}:{info.name}", part, "has no place in TensorRT-LLM's format")
    if match is None or number is None:
        _refuse(f"{TENSOR_FILE}:{module.name}", module.name, "has no TensorRT-LLM module id")
    return match[1], int(match[2]), number


def _read(folder: Path) -> tuple[Array, npt.NDArray[np.int64]]:
    """Both tensors without their batch dimension: float32 [rows, width] and [rows, 3]."""
    weights = _load(folder / WEIGHTS_FILE)
    config = _load(folder / CONFIG_FILE)
    weights = weights[0] if weights.ndim == 3 and len(weights) == 1 else weights
    config = config[0] if config.ndim == 3 and len(config) == 1 else config
    if config.ndim != 2 or config.shape[1] not in (3, 4) or config.dtype.kind not in "iu":
        _refuse(CONFIG_FILE, list(config.shape), "must be whole numbers [1, rows, 3]")
    if config.shape[1] == 4 and config[:, 3].any():
        _refuse(CONFIG_FILE, "DoRA", "rows with magnitudes cannot be converted")
    if weights.ndim != 2 or len(weights) != len(config) or weights.dtype.kind != "f":
        description = f"must be floats [1, {len(config)}, width]"
        _refuse(WEIGHTS_FILE, list(weights.shape), description)
    if not len(config):
        _refuse(CONFIG_FILE, "0 rows", "adapts no module")
    return weights.astype(np.float32), config[:, :3].astype(np.int64)


def _load(path: Path) -> npt.NDArray[np.generic]:
    try:
        array: npt.NDArray[np.generic] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidRequest.field(path.name, str(path), f"cannot be read: {error}") from None
    return array


def _modules(
    number: int, layer: int, places: Mapping[tuple[int, str], str], where: str
) -> list[str]:
    """The base's modules that a row is for: one, or q, k and v where the base has them apart."""
    name = _NAMES.get(number)
    if name is None:
        _refuse(where, number, "is no module id that is served (0-7)")
    split = number == 0 and (layer, name) not in places
    names = list(_QKV) if split else [name]
    found = [places[layer, part] for part in names if (layer, part) in places]
    if len(found) < len(names):
        _refuse(where, f"{name} of layer {layer}", "is not a module of the base")
    return found


def _matrices(
    row: Array, rank: int, in_features: int, out_features: int, where: str
) -> tuple[Array, Array]:
    """A and B of a row, whose rest must be padding."""
    cut, end = rank * in_features, rank * (in_features + out_features)
    if rank < 1 or end > row.size:
        needed = f"needs {end} values for this base, the row has {row.size}"
        _refuse(where, f"rank {rank}", needed)
    if row[end:].any():
        description = f"is followed by values after the {end} of this base; is it another base's?"
        _refuse(where, f"rank {rank}", description)
    return row[:cut].reshape(rank, in_features), row[cut:end].reshape(out_features, rank)


def _refuse(field: str, value: object, description: str) -> NoReturn:
    raise InvalidAdapter.of([Violation.of(field, value, description)])
