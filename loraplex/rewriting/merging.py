"""Merges several adapters of one base by the methods of PEFT's `add_weighted_adapter`.

If an adapter has weight w and scale s, its A is multiplied by sign(w s) sqrt|w s| and its B by
sqrt|w s|. Then all A are combined, and all B. `cat` stacks them instead, so that the result is the
exact sum of the products, and its rank is the sum of the ranks.

Sources: peft 0.21 `tuners/lora/model.py` and `utils/merge_utils.py`; TIES (arXiv 2306.01708); DARE
(arXiv 2311.03099).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loraplex.adapter_format import Geometry, Report
from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, TensorInfo
from loraplex.adapter_format.serving_fields import EOS_FIELD, ROPE_FIELD
from loraplex.adapter_format.tensor_names import PREFIX
from loraplex.errors import InvalidAdapter, InvalidRequest
from loraplex.rewriting.tensors import (
    Array,
    Opened,
    open_adapter,
    rewrite_folder,
    tensor_infos,
    write_adapter,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How adapters are combined."""

    method: str = "linear"
    """`linear`, `cat`, `ties`, `dare_linear` or `dare_ties`."""
    density: float = 0.5
    """Share of the values that `ties` and `dare_*` keep."""
    majority: str = "total"
    """How the `ties` methods elect a sign: by the sum of the values, or by their number."""
    seed: int = 0
    """Seed of the random choice of the values that `dare_*` drop."""

    def check(self) -> None:
        """Raises InvalidRequest if the density is out of range."""
        if not 0 < self.density <= 1:
            raise InvalidRequest.field("--density", self.density, "must be above 0, and at most 1")


@dataclass(frozen=True, slots=True)
class _Side:
    """One adapter's matrices of one module."""

    a: Array
    b: Array
    factor: float
    """Weight times scale."""
    source: int
    """Index of the adapter."""


def merge(
    folders: Sequence[tuple[Path, float]],
    out: Path,
    recipe: Recipe,
    geometry: Geometry | None = None,
    dtype: str = "",
) -> Report:
    """Merge adapters into a new folder.

    Args:
        folders: (folder, weight) of each adapter.
        geometry: of the base of all adapters; None = they must name the same base.
        dtype: F16, BF16 or F32; "" = that of the first adapter.

    Raises:
        InvalidRequest: `recipe` is not valid.
        InvalidAdapter: an adapter is invalid, is for another base, or has parts or ranks that
            cannot be merged.
    """
    recipe.check()
    adapters = [open_adapter(folder, geometry) for folder, _ in folders]
    if geometry is None:
        _check_one_base(folders, adapters)
    check_one_serving(folders, adapters)
    for adapter in adapters:
        _check_mergeable(adapter)
    terms = [
        _Term(adapter, weight, _adapted(adapter))
        for adapter, (_, weight) in zip(adapters, folders, strict=True)
    ]
    config, tensors = _combined(terms, recipe)
    stored = dtype or _pair(next(iter(terms[0].modules.values())))[0].dtype
    return write_adapter(out, config, tensors, stored, geometry)


def without_initial(
    folder: Path, initial: Path, out: Path, geometry: Geometry | None = None, dtype: str = ""
) -> Report:
    """Convert an adapter whose initialisation moved a part of the base into it to a plain LoRA.

    PiSSA, OLoRA, CorDA and the like change the base to W - s B0 A0 before training. Relative to the
    original base, the adapter is s (B A - B0 A0), a LoRA of twice the rank. A table that the
    adapter's file contains is the changed one, so it stays, and A and B with it. Whatever else was
    trained does not depend on the base and stays as well.

    Args:
        initial: the same adapter as it was saved before training.

    Raises:
        InvalidAdapter: a folder is not a valid adapter, or has LoRA on a parameter.
    """
    before = open_adapter(initial, geometry, init_lora_weights=True)
    after = open_adapter(folder, geometry, init_lora_weights=True)
    modules = _adapted(after)
    moved = {
        name: module
        for name, module in _adapted(before).items()
        if name not in modules or modules[name].base_copy is None
    }
    terms = [_Term(after, 1.0, modules), _Term(before, -1.0, moved)]
    config, tensors = _combined(terms, Recipe("cat"))
    pairs = {info.name for module in modules.values() for info in _pair(module)}
    for info in tensor_infos(folder / TENSOR_FILE):
        if info.name not in pairs:
            tensors[info.name] = after.tensor(info)
    return rewrite_folder(folder, out, config, tensors, dtype, geometry)


@dataclass(frozen=True, slots=True)
class _Term:
    """One adapter of a sum."""

    adapter: Opened
    weight: float
    modules: Mapping[str, AdapterModule]
    """Its modules with LoRA matrices, by name."""


def _adapted(adapter: Opened) -> dict[str, AdapterModule]:
    return {module.name: module for module in adapter.report.modules if module.rank}


def _combined(terms: Sequence[_Term], recipe: Recipe) -> tuple[dict[str, object], dict[str, Array]]:
    """The config and the LoRA matrices of a sum of adapters."""
    tensors: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    for name in sorted({name for term in terms for name in term.modules}):
        sides = []
        for index, term in enumerate(terms):
            if name in term.modules:
                module = term.modules[name]
                a, b = _pair(module)
                factor = term.weight * module.scale
                sides.append(_Side(term.adapter.tensor(a), term.adapter.tensor(b), factor, index))
        merged_a, merged_b = _combined_pair(name, sides, recipe, alone=len(terms) == 1)
        tensors[a.name], tensors[b.name] = merged_a, merged_b
        ranks[name] = merged_a.shape[0]
    adapters = [term.adapter for term in terms]
    changed = {**_targets(adapters, ranks), **scaled_by_one(ranks)}
    return {**adapters[0].config, **changed}, tensors


def scaled_by_one(ranks: Mapping[str, int]) -> dict[str, object]:
    """Config fields that give every module its rank and the scale 1."""
    r = max(ranks.values())
    others = {name: rank for name, rank in ranks.items() if rank != r}
    return {
        "r": r,
        "lora_alpha": r,
        "rank_pattern": others,
        "alpha_pattern": others,
        "use_rslora": False,
        "init_lora_weights": True,
    }


def tensor_name(module: str, part: str) -> str:
    """PEFT's tensor name of the matrix "A" or "B" of a linear."""
    return f"{PREFIX}{module}.lora_{part}.weight"


def _check_mergeable(adapter: Opened) -> None:
    """Refuse an adapter that has more than LoRA matrices."""
    for module in adapter.report.modules:
        for part in ("magnitude", "lora_bias", "token_delta", "full", "base_copy", "bias"):
            info = getattr(module, part)
            if info is not None:
                description = "cannot be merged: only LoRA matrices can, so leave this adapter out"
                raise InvalidAdapter.field(f"{TENSOR_FILE}:{info.name}", part, description)


def _pair(module: AdapterModule) -> tuple[TensorInfo, TensorInfo]:
    """A and B of a module.

    Raises:
        InvalidAdapter: its tensors hold all experts of a layer, or it has a bias that is scaled.
    """
    a, b = module.a or module.embedding_a, module.b or module.embedding_b
    assert a is not None and b is not None, "validated as a pair"
    if module.expert is not None:
        description = "is LoRA on experts by target_parameters; leave this adapter out"
        raise InvalidAdapter.field(f"{TENSOR_FILE}:{a.name}", list(a.shape), description)
    if module.lora_bias is not None:
        description = "cannot be converted: no adapter that changed its base has one"
        raise InvalidAdapter.field(f"{TENSOR_FILE}:{module.lora_bias.name}", "", description)
    return a, b


def _combined_pair(
    name: str, sides: Sequence[_Side], recipe: Recipe, *, alone: bool
) -> tuple[Array, Array]:
    if recipe.method == "cat":
        return (
            np.concatenate([side.a * np.float32(side.factor) for side in sides], axis=0),
            np.concatenate([side.b for side in sides], axis=1),
        )
    if len({side.a.shape[0] for side in sides}) > 1:
        ranks = [side.a.shape[0] for side in sides]
        description = f"has different ranks in the adapters, which {recipe.method} cannot merge"
        field = f"{TENSOR_FILE}:{name}"
        raise InvalidAdapter.field(field, ranks, f"{description}; use --method cat")
    roots = [math.sqrt(abs(side.factor)) for side in sides]
    signed = [math.copysign(r, side.factor) for r, side in zip(roots, sides, strict=True)]
    method = "linear" if alone else recipe.method
    keep_a = [_kept(recipe, side, f"{name}.A", side.a) for side in sides]
    keep_b = [_kept(recipe, side, f"{name}.B", side.b) for side in sides]
    return (
        _summed(method, recipe, [side.a for side in sides], signed, keep_a),
        _summed(method, recipe, [side.b for side in sides], roots, keep_b),
    )


Keep = Callable[[], Array]
"""Draws a mask of one tensor: 1.0 for each value that is kept, 0.0 for the others."""


def _summed(
    method: str,
    recipe: Recipe,
    tasks: list[Array],
    weights: Sequence[float],
    keeps: Sequence[Keep],
) -> Array:
    if recipe.density < 1 and method == "ties":
        tasks = [_largest(task, recipe.density) for task in tasks]
    elif recipe.density < 1 and method.startswith("dare"):
        density = np.float32(recipe.density)
        tasks = [task * keep() / density for task, keep in zip(tasks, keeps, strict=True)]
    stack = np.stack(tasks)
    factors = np.asarray(weights, np.float32).reshape(-1, *[1] * tasks[0].ndim)
    if not method.endswith("ties"):
        total: Array = (stack * factors).sum(axis=0, dtype=np.float32)
        return total
    return _disjoint(stack, factors, recipe.majority)


def _disjoint(stack: Array, factors: Array, majority: str) -> Array:
    """TIES: for each value, the mean over the adapters that agree with the elected sign."""
    votes = stack if majority == "total" else np.sign(stack)
    elected = np.where(votes.sum(axis=0) >= 0, 1, -1)
    agree = np.sign(stack) == elected
    total = (stack * factors * agree).sum(axis=0, dtype=np.float32)
    mean: Array = total / np.maximum(agree.sum(axis=0), 1).astype(np.float32)
    return mean


def _largest(tensor: Array, density: float) -> Array:
    """The tensor with all but its largest values (by magnitude) set to zero."""
    flat = tensor.reshape(-1)
    count = int(density * flat.size)
    kept = np.zeros_like(flat)
    if count:
        top = np.argpartition(-np.abs(flat), count - 1)[:count]
        kept[top] = flat[top]
    return kept.reshape(tensor.shape)


def _kept(recipe: Recipe, side: _Side, name: str, tensor: Array) -> Keep:
    """A function that draws the mask of a tensor. The mask depends only on the seed, the adapter's
    index and the tensor, not on earlier draws."""

    def draw() -> Array:
        key = hashlib.sha256(f"{recipe.seed}/{side.source}/{name}".encode()).digest()
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
        return (random.random(tensor.shape) < recipe.density).astype(np.float32)

    return draw


def _targets(adapters: Sequence[Opened], ranks: Mapping[str, int]) -> dict[str, object]:
    """Fields that select the modules: those of the adapters if they agree, otherwise a list of
    names."""
    fields = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    first = adapters[0].report.config
    if all(
        getattr(adapter.report.config, field) == getattr(first, field)
        for adapter in adapters
        for field in fields
    ):
        return {}
    return {**dict.fromkeys(fields), "target_modules": sorted(ranks)}


def check_one_serving(folders: Sequence[tuple[Path, float]], adapters: Sequence[Opened]) -> None:
    """Raises InvalidAdapter if the adapters differ in a field that cannot be merged."""
    for name in (ROPE_FIELD, EOS_FIELD):
        first = adapters[0].config.get(name)
        for (folder, _), adapter in zip(folders, adapters, strict=True):
            value = adapter.config.get(name)
            if value != first:
                description = f"differs from that in {folders[0][0]}, and two cannot be merged"
                raise InvalidAdapter.field(f"{folder}:{name}", value, description)


def _check_one_base(folders: Sequence[tuple[Path, float]], adapters: Sequence[Opened]) -> None:
    first = adapters[0].report.config.base_model_name_or_path
    for (folder, _), adapter in zip(folders, adapters, strict=True):
        named = adapter.report.config.base_model_name_or_path
        if named != first:
            description = (
                f"is not {first!r} as in {folders[0][0]}; pass --base if both are the same base"
            )
            field = f"{folder}/adapter_config.json:base_model_name_or_path"
            raise InvalidAdapter.field(field, named, description)
