"""Merges adapters into the base: the result is a checkpoint that any engine serves without LoRA.

Each weight becomes W + sum of weight * scale * B A, computed in float32 and rounded once to the
dtype of the base. Parts that a plain checkpoint cannot contain are refused by name: an activated
LoRA, a rotary embedding of the adapter's own, and a bias where the base has none. Parts that
replace weights of the base (DoRA, saved modules, trained biases and token rows) are merged from one
adapter of weight 1 only, because they cannot be summed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from loraplex.adapter_format import CONFIG_FILE, TENSOR_FILE, geometry_from_folder
from loraplex.adapter_format.added_tokens import TEXT_FILES
from loraplex.adapter_format.geometry import EMBEDDING, LM_HEAD, Geometry, quantisation_of
from loraplex.adapter_format.quantisation import FIELD
from loraplex.adapter_format.report import AdapterModule
from loraplex.errors import InvalidAdapter, InvalidRequest
from loraplex.rewriting.checkpoint import CheckpointFolder, Edit, TensorLocation
from loraplex.rewriting.merged_rows import (
    COLUMN_CHUNK_ROWS,
    ModuleShare,
    merged_rows,
    with_column_gain,
)
from loraplex.rewriting.merging import check_one_serving
from loraplex.rewriting.tensors import Opened, new_folder, open_adapter

_REPLACING = ("magnitude", "full", "token_delta", "bias")
_COPIED = re.compile(r".*\.(json|txt|model|jinja)|(LICENSE|NOTICE)(\..*)?", re.ASCII)
_FUSED_HALVES = (("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge."""

    num_modules: int
    """Modules of the base that changed."""
    max_rank: int
    is_untied: bool
    """Whether the head became a separate table, because it now differs from the embedding."""


def merge_into_base(
    folders: Sequence[tuple[Path, float]], base: Path, out: Path, dtype: str = ""
) -> Merged:
    """Write the base with the adapters in its weights.

    Args:
        folders: (folder, weight) of each adapter.
        base: folder in Hugging Face layout.
        out: new, or an empty folder.
        dtype: F16, BF16 or F32 for all weights; "" = as the base stores them.

    Raises:
        InvalidRequest: the base is quantised, or its folder is incomplete.
        InvalidAdapter: an adapter is not one of this base, or has parts that cannot be merged.
        AlreadyExists: `out` is not empty.
    """
    geometry = geometry_from_folder(base)
    _refuse_quantised(base)
    adapters = [open_adapter(folder, geometry) for folder, _ in folders]
    check_one_serving(folders, adapters)
    shares: dict[str, list[ModuleShare]] = {}
    for (folder, weight), adapter in zip(folders, adapters, strict=True):
        _check_config(folder, adapter)
        for module in adapter.report.modules:
            share = ModuleShare(adapter, module, weight)
            _check_parts(folder, share, is_alone=len(folders) == 1 and weight == 1)
            shares.setdefault(module.name, []).append(share)
    with new_folder(out) as partial:
        plan = _Plan(CheckpointFolder(base), geometry)
        for name, own in sorted(shares.items()):
            plan.add(name, own)
        is_untied = plan.settle_tied_head(shares)
        plan.checkpoint.write(partial, plan.edits, plan.added, dtype)
        _write_texts(base, [folder for folder, _ in folders], partial)
        _write_config(base, partial, plan, adapters, dtype, is_untied)
        geometry_from_folder(partial)
    max_rank = max(adapter.report.max_rank for adapter in adapters)
    return Merged(len(shares), max_rank, is_untied)


def _refuse_quantised(base: Path) -> None:
    """Raises InvalidRequest, because merged weights would have to be quantised again."""
    quantisation = quantisation_of(json.loads((base / "config.json").read_bytes()))
    if quantisation is not None:
        why = "is quantised; merge into the base in float16 or bfloat16, then quantise the result"
        raise InvalidRequest.field(FIELD, quantisation.method, why)


class _Plan:
    """The tensors of the base that change, and how."""

    def __init__(self, checkpoint: CheckpointFolder, geometry: Geometry) -> None:
        self.checkpoint = checkpoint
        self.edits: dict[str, Edit] = {}
        self.added: dict[str, str] = {}
        self.vocab_size = 0
        """Vocabulary size of the result, if it differs from the base's."""
        self._tied = geometry.tied_embeddings
        names = {m.kind: m.name for m in geometry.modules if m.kind in (EMBEDDING, LM_HEAD)}
        self._embedding = names.get(EMBEDDING, "")
        self._head = names.get(LM_HEAD, "")
        self._biased = {module.name for module in geometry.modules if module.has_bias}

    def add(self, name: str, shares: Sequence[ModuleShare]) -> None:
        """Edit the tensors of one module."""
        self._add_bias(name, shares)
        if not any(_changes_weight(share.module) for share in shares):
            return
        for tensor, begin, end in self._weights(name):
            source = self._source(tensor)
            num_rows = shares[0].module.num_rows or source.num_rows
            self.vocab_size = shares[0].module.num_rows or self.vocab_size
            shape = (num_rows, *source.info.shape[1:])
            _check_copies(shares, source)
            rows = merged_rows(shares, source, begin, is_table=name == self._embedding)
            if name == self._embedding:
                rows = with_column_gain(shares, rows, num_rows)
            self.edits[tensor] = Edit(shape, rows)
            assert end is None or end - begin == num_rows, "halves of one shape"

    def _weights(self, name: str) -> Iterator[tuple[str, int, int | None]]:
        """The tensors in which the base stores a module, each with the module's rows [begin, end)
        that it holds; an end of None means all rows."""
        tensor = f"{name}.weight"
        if tensor in self.checkpoint.tensors or name == self._head:
            yield tensor, 0, None
            return
        container, _, leaf = name.rpartition(".")
        for halves in _FUSED_HALVES:
            parts = [f"{container}.{half}.weight" for half in halves]
            if leaf == "gate_up_proj" and all(p in self.checkpoint.tensors for p in parts):
                begin = 0
                for part in parts:
                    end = begin + self.checkpoint.tensors[part].num_rows
                    yield part, begin, end
                    begin = end
                return
        yield self._other_spelling(name), 0, None

    def _other_spelling(self, name: str) -> str:
        """The weight of a down projection that the base's files call `w2`."""
        tensor = re.sub(r"\.down_proj$", ".w2", name) + ".weight"
        if tensor not in self.checkpoint.tensors:
            _refuse(f"{TENSOR_FILE}:{name}", name, "has no weight in the base's files")
        return tensor

    def _source(self, tensor: str) -> TensorLocation:
        """The tensor in which the base stores a weight; a tied head is read from the embedding."""
        if self._tied and tensor == f"{self._head}.weight":
            return self.checkpoint.tensors[f"{self._embedding}.weight"]
        return self.checkpoint.tensors[tensor]

    def _add_bias(self, name: str, shares: Sequence[ModuleShare]) -> None:
        trained = next((share for share in shares if share.module.bias), None)
        summed = [share for share in shares if share.module.lora_bias]
        if trained is None and not summed:
            return
        tensor = f"{name}.bias"
        if name not in self._biased:
            info = (trained or summed[0]).module.bias or summed[0].module.lora_bias
            description = "cannot be merged: the base has no bias here to add it to"
            _refuse(f"{TENSOR_FILE}:{info.name if info else name}", tensor, description)
        own = self.checkpoint.tensors[tensor]
        total = own.rows(0, own.num_rows)
        if trained is not None and trained.module.bias is not None:
            total = trained.adapter.tensor(trained.module.bias)
        for share in summed:
            assert share.module.lora_bias is not None, "chosen above"
            total = total + share.factor * share.adapter.tensor(share.module.lora_bias)
        self.edits[tensor] = Edit(own.info.shape, lambda begin, end: total[begin:end])

    def settle_tied_head(self, shares: dict[str, list[ModuleShare]]) -> bool:
        """Keep the embedding and a tied head tied if both changed in the same way; returns whether
        they were untied. Mutates: edits, added.

        If the files hold a copy of the tied table, the copy is changed in the same way.
        """
        table, head = f"{self._embedding}.weight", f"{self._head}.weight"
        if not self._tied or not (table in self.edits or head in self.edits):
            return False
        if _facts(shares.get(self._embedding)) == _facts(shares.get(self._head)):
            if head in self.checkpoint.tensors:
                self.edits[head] = self.edits[table]
            else:
                self.edits.pop(head, None)
            return False
        source = self.checkpoint.tensors[table]
        self.edits.setdefault(head, Edit(source.info.shape, source.rows))
        if head not in self.checkpoint.tensors:
            self.added[head] = table
        return True


def _changes_weight(module: AdapterModule) -> bool:
    return bool(module.rank or module.full or module.base_copy or module.token_delta)


def _facts(shares: Sequence[ModuleShare] | None) -> object:
    """The change of a table, in a form that is comparable between an embedding and its tied
    head."""
    found = []
    for share in shares or ():
        module = share.module
        if module.rank:
            return object()  # LoRA on one of the two always unties them.
        table = module.full or module.base_copy
        found.append((table, module.token_delta, module.token_ids))
    return found


def _check_config(folder: Path, adapter: Opened) -> None:
    """Raises InvalidAdapter for a field of the config that merged weights cannot express."""
    config = adapter.report.config
    if config.alora_invocation_tokens is not None:
        description = "takes effect from its invocation tokens on, which merged weights cannot do"
        field = f"{folder}/{CONFIG_FILE}:alora_invocation_tokens"
        _refuse(field, list(config.alora_invocation_tokens), description)
    if config.rope_scaling is not None:
        description = "is a rotary embedding of the adapter's own; write it into the base's config"
        field = f"{folder}/{CONFIG_FILE}:rope_scaling"
        _refuse(field, config.rope_scaling.to_fields(), description)


def _check_parts(folder: Path, share: ModuleShare, *, is_alone: bool) -> None:
    """Raises InvalidAdapter for parts that replace weights of the base, unless the adapter is
    merged alone: they can be neither summed nor scaled."""
    for part in () if is_alone else _REPLACING:
        info = getattr(share.module, part)
        if info is not None:
            description = "replaces a part of the base: merge this adapter alone, with weight 1"
            _refuse(f"{folder}/{TENSOR_FILE}:{info.name}", part, description)


def _check_copies(shares: Sequence[ModuleShare], source: TensorLocation) -> None:
    """Raises InvalidAdapter if an adapter was trained on a table other than the base's, unless it
    is merged alone."""
    if len(shares) == 1 and shares[0].weight == 1:
        return
    for share in shares:
        info = share.module.base_copy
        if info is None:
            continue
        copy = share.source(info)
        same_size = copy.info.shape == source.info.shape
        for begin in range(0, copy.num_rows if same_size else 0, COLUMN_CHUNK_ROWS):
            end = begin + COLUMN_CHUNK_ROWS
            same_size = same_size and np.array_equal(copy.rows(begin, end), source.rows(begin, end))
        if not same_size:
            description = "is not the base's table: merge this adapter alone, with weight 1"
            _refuse(f"{TENSOR_FILE}:{info.name}", list(info.shape), description)


def _write_texts(base: Path, folders: Sequence[Path], out: Path) -> None:
    """Copy tokenizer and licences of the base; those of an adapter that is merged alone take
    precedence."""
    for path in sorted(base.iterdir()):
        if path.is_file() and _COPIED.fullmatch(path.name) and ".index." not in path.name:
            shutil.copyfile(path, out / path.name)
    for name in TEXT_FILES if len(folders) == 1 else ():
        if (folders[0] / name).is_file():
            shutil.copyfile(folders[0] / name, out / name)


def _write_config(
    base: Path, out: Path, plan: _Plan, adapters: Sequence[Opened], dtype: str, is_untied: bool
) -> None:
    config = json.loads((base / "config.json").read_bytes())
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    changes: dict[str, object] = {}
    if dtype:
        changes["torch_dtype" if "torch_dtype" in config else "dtype"] = names[dtype]
    if plan.vocab_size:
        changes["vocab_size"] = plan.vocab_size
        padding = config.get("pad_token_id")
        if isinstance(padding, int) and padding >= plan.vocab_size:
            changes["pad_token_id"] = None  # transformers does not load a table that lacks a row.
    if is_untied:
        changes["tie_word_embeddings"] = False
    _update(out / "config.json", changes)
    eos = list(adapters[0].report.config.eos_token_ids)
    if eos:
        for name in ("config.json", "generation_config.json"):
            _update(out / name, {"eos_token_id": eos})


def _update(path: Path, changes: dict[str, object]) -> None:
    fields = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps({**fields, **changes}, indent=2) + "\n")


def _refuse(field: str, value: object, description: str) -> NoReturn:
    raise InvalidAdapter.field(field, value, description)
