"""Rows of the embedding and the head that an adapter replaces.

Adapters may bring single trained rows, a whole saved table, or the table under their LoRA matrices,
which is usually the base's own. Whatever they bring, what is kept is the difference: the token ids
whose rows are not the base's, and those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TensorInfo
from services.worker.layers.linear import BaseLinear

CHUNK_ROWS = 8192
"""Rows compared at a time."""

Read = Callable[[TensorInfo], Tensor]
"""Reads one tensor of the adapter's file."""


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Rows in place of the base's."""

    token_ids: tuple[int, ...]
    """Ascending."""
    rows: Tensor
    """`[len(token_ids), width]` in the model's dtype, on the CPU."""


def brings_rows(module: AdapterModule) -> bool:
    """Whether the module may replace rows; cheap."""
    return any((module.token_delta, module.full, module.base_copy))


def changed_rows(
    module: AdapterModule, base: BaseLinear, dtype: torch.dtype, read: Read
) -> ChangedRows:
    """Compare what the module brings with the base's table."""
    if module.token_delta is not None:
        order = sorted(range(len(module.token_ids)), key=module.token_ids.__getitem__)
        rows = read(module.token_delta)[order].to(dtype)
        return ChangedRows(tuple(module.token_ids[i] for i in order), rows)
    table = module.full or module.base_copy
    assert table is not None, module.name
    return _difference(read(table).to(dtype), base, dtype)


def _difference(table: Tensor, base: BaseLinear, dtype: torch.dtype) -> ChangedRows:
    differs = []
    for begin in range(0, len(table), CHUNK_ROWS):
        end = min(begin + CHUNK_ROWS, len(table))
        own = base.weight_rows(begin, end).to("cpu", dtype)
        differs.append((table[begin:end] != own).any(dim=1))
    ids = torch.cat(differs).nonzero()[:, 0]
    return ChangedRows(tuple(ids.tolist()), table[ids])


def with_tied_rows(
    modules: Sequence[AdapterModule], embedding: str, head: str
) -> tuple[AdapterModule, ...]:
    """Give single trained rows of a tied embedding to the head, too, as PEFT does."""
    trained = next((m for m in modules if m.name == embedding and m.token_delta), None)
    if trained is None:
        return tuple(modules)
    own = next((m for m in modules if m.name == head), AdapterModule(head))
    shared = replace(own, token_delta=trained.token_delta, token_ids=trained.token_ids)
    return (*(m for m in modules if m.name != head), shared)
