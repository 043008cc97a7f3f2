"""Converts adapters whose tensors are named, split or stacked differently from PEFT's.

Tinker's exports: `unembed_tokens` is `lm_head`; `attn` is `self_attn`; the fused `in_proj_qkv` of
a gated delta net is trained in three parts; and the experts of a layer are one tensor for each of
`w1` (gate), `w2` (down) and `w3` (up): A `[experts or 1, rank, in]` and B `[experts or 1, out,
rank]`, 1 where all experts share it. They are converted to what PEFT writes for `in_proj_qkv` and
for `target_parameters`. Ranks and alphas grow by the same factor, so that every scale is kept.

Text-only: LoRA on vision and audio towers is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loraplex.adapter_format import CONFIG_FILE, TENSOR_FILE, Geometry, Report
from loraplex.adapter_format.config import MAX_CONFIG_BYTES
from loraplex.adapter_format.conversion_field import conversion
from loraplex.adapter_format.experts import PARAMETERS
from loraplex.adapter_format.safetensors_header import TensorInfo
from loraplex.adapter_format.strict_json import read_object
from loraplex.adapter_format.tensor_names import PREFIX
from loraplex.adapter_format.text_model import is_in_tower
from loraplex.errors import InvalidAdapter
from loraplex.rewriting.tensors import Array, read_tensor, rewrite_folder, tensor_infos

_PARTS = (".lora_A.weight", ".lora_B.weight")
_SPLIT = re.compile(r"(.+\.linear_attn)\.in_proj_([qkv])", re.ASCII)
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(w[123]|gate_proj|up_proj|down_proj)", re.ASCII)
_EXPERT = re.compile(r"(.+\.mlp\.experts\.\d+)\.(w[123])", re.ASCII)
_ATTENTION = re.compile(r"(.*layers\.\d+)\.attn\.", re.ASCII)
_HEADS = ("unembed_tokens", "lm_head")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_GATE, _UP, _DOWN = _PROJECTIONS["w1"], _PROJECTIONS["w3"], _PROJECTIONS["w2"]


@dataclass(slots=True)
class _Rewritten:
    """The converted content of a folder."""

    tensors: dict[str, Array] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    """Ranks that differ from the config's, by module or parameter."""
    parameters: set[str] = field(default_factory=set)

    def add(self, module: str, a: Array, b: Array, tensor_module: str = "") -> None:
        """Add one pair; `tensor_module` is set if its tensors are not named like the module."""
        name = PREFIX + (tensor_module or module)
        self.tensors[f"{name}{_PARTS[0]}"] = a
        self.tensors[f"{name}{_PARTS[1]}"] = b
        self.ranks[module] = a.shape[0]


def is_tinker(folder: Path) -> bool:
    """Whether a folder's tensors are named as Tinker exports them."""
    return any(_is_respelt(info) for info in _infos(folder))


def from_tinker(folder: Path, out: Path, geometry: Geometry | None = None) -> Report:
    """Convert an export of Tinker to a PEFT folder.

    Args:
        out: new, or an empty folder.
        geometry: the base, which says how it lays out its experts.

    Raises:
        InvalidAdapter: a tensor belongs to no module, a part of `in_proj_qkv` is missing, or shapes
            or config fields are invalid.
    """
    pairs = _pairs(folder)
    made = _Rewritten()
    config = _config(folder)
    alpha, rank = _number(config, "lora_alpha"), _number(config, "r")
    is_interleaved = _is_interleaved(geometry, config, pairs)
    fused: dict[str, dict[str, tuple[Array, Array]]] = {}
    stacked: dict[str, dict[str, tuple[Array, Array]]] = {}
    for module, pair in pairs.items():
        if match := _SPLIT.fullmatch(module):
            fused.setdefault(match[1], {})[match[2]] = pair
        elif match := _STACKED.fullmatch(module):
            stacked.setdefault(match[1], {})[_PROJECTIONS.get(match[2], match[2])] = pair
        else:
            made.add(_plain(module), *pair)
    for module, parts in fused.items():
        made.add(f"{_plain(module)}.in_proj_qkv", *_joined(module, parts))
    for container, projections in stacked.items():
        _add_experts(made, _plain(container), projections, interleaved=is_interleaved)
    modules = sorted(made.ranks.keys() - made.parameters)
    others = {name: own for name, own in made.ranks.items() if own != rank}
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **config,
        "target_modules": modules,
        "target_parameters": sorted({_suffix(name) for name in made.parameters}) or None,
        "rank_pattern": others,
        "alpha_pattern": {name: alpha * own / rank for name, own in others.items()},
    }
    return rewrite_folder(folder, out, written, made.tensors, geometry=geometry)


def text_only(folder: Path, out: Path) -> bool:
    """Write a folder without LoRA on towers; returns False and writes nothing if there is no such
    LoRA."""
    infos = _infos(folder)
    kept = [info for info in infos if not is_in_tower(info.name)]
    dropped = {_module(info.name) for info in infos if is_in_tower(info.name)}
    if not dropped:
        return False
    if not kept:
        why = "is in a tower, as all tensors are: nothing of the text model is left"
        raise InvalidAdapter.field(f"{TENSOR_FILE}:{infos[0].name}", "", why)
    config = {**_config(folder), **conversion("text and images", dropped=len(dropped))}
    tensors = {info.name: read_tensor(folder / TENSOR_FILE, info) for info in kept}
    rewrite_folder(folder, out, config, tensors)
    return True


def _infos(folder: Path) -> tuple[TensorInfo, ...]:
    path = folder / TENSOR_FILE
    return tensor_infos(path) if path.is_file() else ()


def _is_respelt(info: TensorInfo) -> bool:
    module = _module(info.name)
    is_split = _SPLIT.fullmatch(module) or _STACKED.fullmatch(module) or _EXPERT.fullmatch(module)
    return _plain(module) != module or is_split is not None


def _module(name: str) -> str:
    for part in _PARTS:
        name = name.removesuffix(part)
    return name.removeprefix(PREFIX)


def _plain(module: str) -> str:
    """A module's name in transformers, with the wrapper's prefix if it had one."""
    if module.rpartition(".")[2] in _HEADS:
        return "language_model.lm_head" if module.startswith("language_model.") else "lm_head"
    if match := _EXPERT.fullmatch(module):
        return f"{match[1]}.{_PROJECTIONS[match[2]]}"
    return _ATTENTION.sub(r"\1.self_attn.", module)


def _config(folder: Path) -> dict[str, object]:
    return read_object((folder / CONFIG_FILE).read_bytes(), CONFIG_FILE, MAX_CONFIG_BYTES)


def _number(config: Mapping[str, object], key: str) -> float:
    value = config.get(key)
    if type(value) not in (int, float) or float(str(value)) <= 0:
        why = "must be a number above 0"
        raise InvalidAdapter.field(f"{CONFIG_FILE}:{key}", value, why)
    return float(str(value))


def _pairs(folder: Path) -> dict[str, tuple[Array, Array]]:
    """A and B of every module, in float32."""
    path = folder / TENSOR_FILE
    by_name = {info.name: info for info in _infos(folder)}
    pairs = {}
    for name in sorted(by_name):
        module = _module(name)
        a, b = (by_name.get(f"{PREFIX}{module}{part}") for part in _PARTS)
        if a is None or b is None or not name.startswith(PREFIX):
            why = "is not a lora_A or lora_B with its counterpart; export the adapter again"
            raise InvalidAdapter.field(f"{TENSOR_FILE}:{name}", name, why)
        wanted = 3 if _STACKED.fullmatch(module) else 2
        rank = a.shape[-2] if len(a.shape) == wanted else -1
        if len(b.shape) != wanted or b.shape[-1] != rank or rank == 0:
            why = f"must be {wanted}-dimensional, with one rank: A {list(a.shape)}, "
            why += f"B {list(b.shape)}"
            raise InvalidAdapter.field(f"{TENSOR_FILE}:{name}", module, why)
        pairs[module] = read_tensor(path, a), read_tensor(path, b)
    return pairs


def _joined(module: str, parts: Mapping[str, tuple[Array, Array]]) -> tuple[Array, Array]:
    """One pair that computes the outputs of q, k and v, concatenated."""
    missing = sorted({"q", "k", "v"} - parts.keys())
    if missing:
        name = f"{module}.in_proj_{missing[0]}"
        why = "is missing, so that the outputs of in_proj_qkv cannot be told apart"
        raise InvalidAdapter.field(TENSOR_FILE, name, why)
    pairs = [parts[part] for part in "qkv"]
    return np.concatenate([a for a, _ in pairs]), _diagonal([b for _, b in pairs])


def _diagonal(blocks: list[Array]) -> Array:
    """A block-diagonal matrix."""
    result = np.zeros(np.sum([block.shape for block in blocks], axis=0), np.float32)
    row = column = 0
    for block in blocks:
        result[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return result


def _is_interleaved(
    geometry: Geometry | None, config: Mapping[str, object], modules: Mapping[str, object]
) -> bool:
    """Whether the gate and up rows of an expert alternate, as in gpt-oss."""
    if geometry is not None:
        return geometry.model_type == "gpt_oss"
    is_named = "gpt-oss" in str(config.get("base_model_name_or_path")).lower()
    return is_named or any(_ATTENTION.match(module) for module in modules)


def _add_experts(
    made: _Rewritten,
    container: str,
    projections: Mapping[str, tuple[Array, Array]],
    *,
    interleaved: bool,
) -> None:
    """The two parameters of a layer; if both are adapted, PEFT nests the wrapper of gate_up_proj
    inside the other."""
    num_experts = max(len(side) for pair in projections.values() for side in pair)
    for name, pair in projections.items():
        if any(len(side) not in (1, num_experts) for side in pair):
            why = f"must have 1 or {num_experts} experts"
            counts = [len(side) for side in pair]
            raise InvalidAdapter.field(f"{container}.{name}", counts, why)
    found: dict[str, tuple[Array, Array]] = {}
    if _GATE in projections or _UP in projections:
        found[PARAMETERS[0]] = _gate_up(projections, num_experts, interleaved=interleaved)
    if _DOWN in projections:
        found[PARAMETERS[1]] = _broadcast(projections[_DOWN], num_experts)
    for parameter, (a, b) in found.items():
        is_inner = parameter == PARAMETERS[0] and len(found) == 2
        name, rank = f"{container}.{parameter}", a.shape[1]
        # A is stacked expert by expert, B rank by rank.
        made.add(
            name,
            a.reshape(-1, a.shape[2]),
            b.transpose(1, 2, 0).reshape(b.shape[1], -1),
            f"{container}.base_layer" if is_inner else container,
        )
        made.ranks[name] = rank
        made.parameters.add(name)


def _broadcast(pair: tuple[Array, Array], num_experts: int) -> tuple[Array, Array]:
    a, b = (np.broadcast_to(side, (num_experts, *side.shape[1:])) for side in pair)
    return a, b


def _gate_up(
    projections: Mapping[str, tuple[Array, Array]], num_experts: int, *, interleaved: bool
) -> tuple[Array, Array]:
    """A `[experts, rank, in]` and B `[experts, 2 out, rank]`, the ranks of both together."""
    ones = [projections[name] for name in (_GATE, _UP) if name in projections]
    if len(ones) == 1:
        a, b = ones[0]
        ones.insert(_GATE in projections, (a[:, :0], b[:, :, :0]))
    (gate_a, gate_b), (up_a, up_b) = (_broadcast(pair, num_experts) for pair in ones)
    out, rank = gate_b.shape[1], gate_a.shape[1]
    b = np.zeros((num_experts, 2 * out, rank + up_a.shape[1]), np.float32)
    gates, ups = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (
        slice(0, out), slice(out, None))  # fmt: skip
    b[:, gates, :rank], b[:, ups, rank:] = gate_b, up_b
    return np.concatenate((gate_a, up_a), axis=1), b


def _suffix(parameter: str) -> str:
    """The part of a parameter's name after the layer, which all layers share."""
    return ".".join(parameter.split(".")[-3:])
