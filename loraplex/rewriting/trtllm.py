"""Converts TensorRT-LLM's LoraWeights and LoraConfig (two .npy files) to PEFT and back.

`model.lora_weights.npy` is `[1, rows, width]`: for each module of each layer A `[rank, in]`, then B
`[out, rank]` with the scale folded in, then with DoRA the magnitude `[out]`, all flattened, then
zeros up to the widest row. A row of experts holds A of all experts, then B of all. The magnitude is
divided by the norms of the rows of W + B A, as TensorRT-LLM wants it. `model.lora_config.npy` is
int32 `[1, rows, 3]`: module id, layer, rank; a fourth column says whether the row is of a DoRA.
bfloat16, which numpy lacks, is written as TensorRT-LLM does: as two raw bytes (`|V2`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from loraplex.adapter_format import CONFIG_FILE as PEFT_CONFIG
from loraplex.adapter_format import Geometry, Report
from loraplex.adapter_format.geometry import Module
from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TENSOR_FILE
from loraplex.adapter_format.tensor_names import PREFIX
from loraplex.errors import InvalidAdapter, InvalidRequest
from loraplex.rewriting.checkpoint import CheckpointFolder
from loraplex.rewriting.merging import scaled_by_one, tensor_name
from loraplex.rewriting.tensors import Array, Opened, new_folder, stored_bytes, write_adapter
from loraplex.rewriting.trtllm_modules import (
    CROSS_ATTENTION,
    EXPERT_IDS,
    FUSED_MLP,
    LAST_ID,
    MLP_H_TO_4H,
    BaseLinears,
    TrtllmModule,
    trtllm_module_of,
)

WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"
_NPY_DTYPES = {"F16": "<f2", "F32": "<f4", "BF16": "|V2"}
_UNREPRESENTED = ("lora_bias", "token_delta", "full", "base_copy", "bias")


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the format, or the part of it for one expert."""

    rank: int
    a: Array
    b: Array
    """B, multiplied by the scale."""
    gain: Array | None = None

    @property
    def values(self) -> Array:
        """The values, in the order of the file."""
        gain = () if self.gain is None else (self.gain,)
        return np.concatenate([part.reshape(-1) for part in (self.a, self.b, *gain)])


def is_trtllm(folder: Path) -> bool:
    """Whether a folder holds the two files."""
    return (folder / WEIGHTS_FILE).is_file() and (folder / CONFIG_FILE).is_file()


def to_trtllm(
    adapter: Opened,
    out: Path,
    dtype: str = "F16",
    geometry: Geometry | None = None,
    base: Path | None = None,
) -> int:
    """Write an adapter in TensorRT-LLM's format; returns the number of rows.

    Args:
        dtype: F16, BF16 or F32.
        geometry: of the base; needed for LoRA on experts.
        base: its folder; needed for DoRA.

    Raises:
        InvalidAdapter: it adapts a module for which the format has no id, or a value does not fit
            float16.
        InvalidRequest: the base is required and was not given.
    """
    for field in ("alora_invocation_tokens", "rope_scaling"):
        if getattr(adapter.report.config, field) is not None:
            value = adapter.config.get(field)
            _refuse(f"{PEFT_CONFIG}:{field}", value, "cannot be expressed in TensorRT-LLM's format")
    rows = _rows(adapter, geometry, None if base is None else CheckpointFolder(base))
    order = sorted(rows)
    is_dora = any(row.gain is not None for row in rows.values())
    config = []
    for layer, number in order:
        row = rows[layer, number]
        config.append([number, layer, row.rank, *([int(row.gain is not None)] if is_dora else [])])
    width = max(row.values.size for row in rows.values())
    weights = np.zeros((len(rows), width), np.float32)
    for index, key in enumerate(order):
        values = rows[key].values
        weights[index, : values.size] = values
    if dtype == "F16" and not (np.abs(weights) <= np.finfo(np.float16).max).all():
        description = "has values that float16 cannot hold; use --dtype float32 or bfloat16"
        raise InvalidAdapter.field(TENSOR_FILE, dtype, description)
    stored = np.frombuffer(stored_bytes(weights, dtype), np.dtype(_NPY_DTYPES[dtype]))
    with new_folder(out) as partial:
        np.save(partial / WEIGHTS_FILE, stored.reshape(1, *weights.shape), allow_pickle=False)
        np.save(partial / CONFIG_FILE, np.asarray([config], np.int32), allow_pickle=False)
    return len(rows)


def _rows(
    adapter: Opened, geometry: Geometry | None, base: CheckpointFolder | None
) -> dict[tuple[int, int], _Row]:
    """Rows by layer and module id."""
    rows: dict[tuple[int, int], _Row] = {}
    experts: dict[tuple[int, int], dict[int, _Row]] = {}
    for module in adapter.report.modules:
        target = _trtllm_module(module)
        row = _row(adapter, module, base)
        if target.expert is not None:
            for number, half in _halves(target, row):
                experts.setdefault((target.layer, number), {})[target.expert] = half
            continue
        if target.leaf == FUSED_MLP:
            row = _with_swapped_halves(row)
        rows[target.layer, target.number] = row
    for (layer, number), by_index in experts.items():
        if geometry is None:
            _need_base("the files of one adapter may not name all experts")
        rows[layer, number] = _stacked(by_index, BaseLinears.of(geometry).num_experts(layer))
    return rows


def _row(adapter: Opened, module: AdapterModule, base: CheckpointFolder | None) -> _Row:
    a, b = adapter.pair(module)
    b = b * np.float32(module.scale)
    if module.magnitude is None:
        return _Row(module.rank, a, b)
    norms = _norms(base, module.name, a, b)
    return _Row(module.rank, a, b, adapter.tensor(module.magnitude).reshape(-1) / norms)


def _halves(target: TrtllmModule, row: _Row) -> Iterator[tuple[int, _Row]]:
    """The row of an expert; two rows if gate and up are one parameter and share A."""
    if target.leaf != FUSED_MLP:
        yield target.number, row
        return
    middle = len(row.b) // 2
    yield 13, _Row(row.rank, row.a, row.b[:middle])
    yield 15, _Row(row.rank, row.a, row.b[middle:])


def _stacked(by_index: dict[int, _Row], num_experts: int) -> _Row:
    """All experts in one row: zeros for those without LoRA, and up to the largest rank."""
    rank = max(row.rank for row in by_index.values())
    some = next(iter(by_index.values()))
    a = np.zeros((num_experts, rank, some.a.shape[1]), np.float32)
    b = np.zeros((num_experts, some.b.shape[0], rank), np.float32)
    for index, row in by_index.items():
        a[index, : row.rank], b[index, :, : row.rank] = row.a, row.b
    return _Row(rank, a, b)


def _with_swapped_halves(row: _Row) -> _Row:
    """`gate_up_proj` holds gate, then up; TensorRT-LLM's fused projection up, then gate."""
    gain = None if row.gain is None else np.roll(row.gain, len(row.gain) // 2)
    return _Row(row.rank, row.a, np.roll(row.b, len(row.b) // 2, axis=0), gain)


def from_trtllm(
    folder: Path,
    out: Path,
    geometry: Geometry,
    base_id: str = "",
    dtype: str = "F16",
    base: Path | None = None,
) -> Report:
    """Convert TensorRT-LLM's two files, in which the scale is folded into B, to a PEFT folder.

    Args:
        geometry: of the base, because the files do not say how wide A and B are.
        base_id: for `base_model_name_or_path`.
        base: folder of the base, needed for DoRA.

    Raises:
        InvalidRequest: a file cannot be read, or DoRA needs `base` and it was not given.
        InvalidAdapter: a row is invalid or does not fit the base; the error names it.
    """
    weights, config = _load(folder / WEIGHTS_FILE), _load(folder / CONFIG_FILE)
    return from_arrays(weights, config, out, geometry, base_id, dtype, base)


def from_arrays(
    weights: npt.NDArray[np.generic],
    config: npt.NDArray[np.generic],
    out: Path,
    geometry: Geometry,
    base_id: str = "",
    dtype: str = "",
    base: Path | None = None,
) -> Report:
    """Convert the content of the two files, as `from_trtllm` does; `dtype` "" = that of the
    weights."""
    dtype = dtype or next((d for d, npy in _NPY_DTYPES.items() if weights.dtype == npy), "F32")
    weights, config = _checked(weights, config)
    bases = BaseLinears.of(geometry)
    checkpoint = None if base is None else CheckpointFolder(base)
    tensors: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    use_dora = bool(config[:, 3].any())
    for index, (number, layer, rank, is_dora) in enumerate(config.tolist()):
        where = f"{CONFIG_FILE}:[{index}]"
        modules = _modules(number, layer, bases, where)
        if use_dora and not is_dora:
            _refuse(where, "no DoRA", "is mixed with rows of DoRA, which PEFT cannot express")
        row = _split(weights[index], rank, number, modules, bool(is_dora), where)
        for module, share in _shares(number, modules, row):
            if module.name in ranks:
                _refuse(where, module.name, "is adapted by an earlier row already")
            tensors[tensor_name(module.name, "A")] = share.a
            tensors[tensor_name(module.name, "B")] = share.b
            if share.gain is not None:
                name = f"{PREFIX}{module.name}.lora_magnitude_vector"
                tensors[name] = share.gain * _norms(checkpoint, module.name, share.a, share.b)
            ranks[module.name] = rank
    peft = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_id or None,
        "target_modules": _targets(ranks, geometry),
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": 0.0,
        "use_dora": use_dora,
    }
    return write_adapter(out, {**peft, **scaled_by_one(ranks)}, tensors, dtype, geometry)


def _targets(ranks: dict[str, int], geometry: Geometry) -> list[str]:
    """The last parts of the names if they match no other module, otherwise the full names."""
    by_leaf: dict[str, set[str]] = {}
    for module in geometry.modules:
        by_leaf.setdefault(module.name.rpartition(".")[2], set()).add(module.name)
    leaves = {name: name.rpartition(".")[2] for name in ranks}
    return sorted({leaf if by_leaf[leaf] <= set(ranks) else name for name, leaf in leaves.items()})


def _shares(number: int, modules: Sequence[Module], row: _Row) -> Iterator[tuple[Module, _Row]]:
    """The matrices of a row for each module that it adapts."""
    if number in EXPERT_IDS:
        for module, a, b in zip(modules, row.a, row.b, strict=True):
            yield module, _Row(row.rank, a, b)
        return
    if number == MLP_H_TO_4H and modules[0].name.endswith(FUSED_MLP):
        row = _with_swapped_halves(row)
    begin = 0
    for module in modules:
        end = begin + module.out_features
        gain = None if row.gain is None else row.gain[begin:end]
        yield module, _Row(row.rank, row.a, row.b[begin:end], gain)
        begin = end


def _norms(base: CheckpointFolder | None, name: str, a: Array, b: Array) -> Array:
    """Norms of the rows of W + B A, where B has the scale."""
    if base is None:
        _need_base("DoRA's magnitudes are divided by norms of the base's weights")
    source = base.tensors[f"{name}.weight"]
    norms: Array = np.linalg.norm(source.rows(0, source.num_rows) + b @ a, axis=1)
    return norms


def _trtllm_module(module: AdapterModule) -> TrtllmModule:
    """How the format names a module. Raises InvalidAdapter if it has none."""
    for part in _UNREPRESENTED:
        info = getattr(module, part)
        if info is not None:
            _refuse(
                f"{TENSOR_FILE}:{info.name}", part, "cannot be expressed in TensorRT-LLM's format"
            )
    target = trtllm_module_of(module.name)
    if target is None or module.a is None:
        _refuse(f"{TENSOR_FILE}:{module.name}", module.name, "has no TensorRT-LLM module id")
    return target


def _checked(
    weights: npt.NDArray[np.generic], config: npt.NDArray[np.generic]
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Both tensors without their batch dimension: weights, float32 `[rows, width]`, and config,
    int64 `[rows, 4]`. Raises InvalidAdapter for other shapes and dtypes."""
    weights = weights[0] if weights.ndim == 3 and len(weights) == 1 else weights
    config = config[0] if config.ndim == 3 and len(config) == 1 else config
    if config.ndim != 2 or config.shape[1] not in (3, 4) or config.dtype.kind not in "iu":
        _refuse(CONFIG_FILE, list(config.shape), "must be integers [1, rows, 3]")
    is_bfloat16 = weights.dtype == np.dtype("V2")
    if (
        weights.ndim != 2
        or len(weights) != len(config)
        or not (weights.dtype.kind == "f" or is_bfloat16)
    ):
        description = f"must be floats [1, {len(config)}, width]"
        _refuse(WEIGHTS_FILE, list(weights.shape), description)
    if not len(config):
        _refuse(CONFIG_FILE, "0 rows", "adapts no module")
    if is_bfloat16:
        bits = np.ascontiguousarray(weights).view("<u2").astype(np.uint32)
        weights = (bits << 16).view(np.float32)
    flags = np.zeros((len(config), 1), np.int64)
    columns = np.concatenate([config.astype(np.int64), flags], axis=1)[:, :4]
    return weights.astype(np.float32), columns


def _load(path: Path) -> npt.NDArray[np.generic]:
    try:
        array: npt.NDArray[np.generic] = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError, OverflowError) as error:
        raise InvalidRequest.field(path.name, str(path), f"cannot be read: {error}") from None
    return array


def _modules(number: int, layer: int, bases: BaseLinears, where: str) -> list[Module]:
    """The modules of the base that a row adapts."""
    if number in CROSS_ATTENTION:
        _refuse(where, number, "belongs to cross attention, which no supported base has")
    if not 0 <= number <= LAST_ID:
        _refuse(where, number, f"is not a supported module id (0-{LAST_ID})")
    found = bases.modules_of(number, layer)
    if not found:
        _refuse(where, f"id {number} of layer {layer}", "is not a module of the base")
    return found


def _split(
    row: Array, rank: int, number: int, modules: Sequence[Module], is_dora: bool, where: str
) -> _Row:
    """A, B and magnitude of a row; the rest of the row must be padding."""
    is_expert = number in EXPERT_IDS
    count = len(modules) if is_expert else 1
    in_features = modules[0].in_features
    widths = [module.out_features for module in modules]
    out_features = widths[0] if is_expert else sum(widths)
    cut = count * rank * in_features
    end = cut + count * rank * out_features
    num_values = end + (out_features if is_dora else 0)
    if rank < 1 or num_values > row.size:
        why = f"needs {num_values} values for this base, the row has {row.size}"
        _refuse(where, f"rank {rank}", why)
    if row[num_values:].any():
        description = f"is followed by more than the {num_values} values of this base; "
        description += "is it an adapter of another base?"
        _refuse(where, f"rank {rank}", description)
    experts = (count,) if is_expert else ()
    return _Row(
        rank,
        row[:cut].reshape(*experts, rank, in_features),
        row[cut:end].reshape(*experts, out_features, rank),
        row[end:num_values] if is_dora else None,
    )


def _need_base(why: str) -> NoReturn:
    raise InvalidRequest.field("--base", "", f"is required, as a folder or hub id: {why}")


def _refuse(field: str, value: object, description: str) -> NoReturn:
    raise InvalidAdapter.field(field, value, description)
