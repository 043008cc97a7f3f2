"""What an adapter's image takes from the base: DoRA's gains, and differences from its weights.

Computed where the base is, beside the step, once for each image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TensorInfo
from services.worker.adapters.layout import AdapterLayout
from services.worker.adapters.packing import ChangedRows
from services.worker.adapters.site_plan import Part, Role
from services.worker.adapters.values import Read, Values
from services.worker.layers.linear import BaseLinear
from services.worker.model.decoder import SiteWeights
from services.worker.model.sites import EMBEDDING, LM_HEAD

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By safetensors name."""
GAIN_CHUNK_ROWS = 1024
"""Rows of W + s B A that exist at once while a DoRA gain is computed."""
TABLE_CHUNK_ROWS = 8192
"""Rows of a saved table compared with the base's at a time."""


class SiteValues:
    """Implements `packing.BaseValues` over a model's weights."""

    def __init__(self, sites: SiteWeights, layout: AdapterLayout, device: torch.device) -> None:
        self._sites = sites
        self._dtype = TORCH_DTYPES[layout.dtype]
        self._device = device

    @torch.inference_mode()
    def changed_rows(self, module: AdapterModule, read: Read) -> ChangedRows | None:
        """Whatever the module brings (single rows, a saved table, the table under its LoRA
        matrices, which is usually the base's own): the rows that are not the base's."""
        site_id = self._sites.table.places[module.name].site_id
        if self._sites.table.sites[site_id].kind not in (EMBEDDING, LM_HEAD):
            return None
        if module.token_delta is not None:
            order = sorted(range(len(module.token_ids)), key=module.token_ids.__getitem__)
            rows = tensor_of(read(module.token_delta))[order].to(self._dtype)
            return ChangedRows(tuple(module.token_ids[i] for i in order), values_of(rows))
        table = module.full or module.base_copy
        if table is None:
            return None
        own = self._sites.linears[site_id]
        return _difference(tensor_of(read(table)).to(self._dtype), own, self._dtype)

    @torch.inference_mode()
    def value(self, part: Part, site_id: int, read: Read) -> Values:
        """float32 `[1, out]`."""
        module = part.module
        if part.role is Role.NORM:
            weight = _tensor(module.full, read).float() + self._sites.norm_offset
            return values_of(weight[None])
        if part.role is Role.BIAS:
            trained = _tensor(module.bias, read).float()
            rows = slice(part.col_begin, part.col_begin + len(trained))
            return values_of((trained - self._sites.biases[site_id][rows].float().cpu())[None])
        assert part.role is Role.GAIN, part.role
        gain = dora_gain(
            self._sites.linears[site_id],
            part.col_begin,
            _tensor(module.a, read).to(self._device),
            _tensor(module.b, read).to(self._device),
            module.scale,
            _tensor(module.magnitude, read).to(self._device),
        )
        return values_of(gain[None].cpu())


def dora_gain(
    base: BaseLinear, out_begin: int, a: Tensor, b: Tensor, scale: float, magnitude: Tensor
) -> Tensor:
    """m / ||W + scale * B A|| by row, in row chunks; float32 `[out]`.

    Args:
        base: the site's weight; the module's rows begin at `out_begin`.
        a: `[rank, in]`. b: `[out, rank]`. magnitude: `[out]` or `[out, 1]`.

    Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", eq. 5.
    """
    a, b = a.float(), b.float()
    norms = []
    for begin in range(0, len(b), GAIN_CHUNK_ROWS):
        end = min(begin + GAIN_CHUNK_ROWS, len(b))
        weight = base.weight_rows(out_begin + begin, out_begin + end)
        norms.append(torch.linalg.vector_norm(weight + scale * (b[begin:end] @ a), dim=1))
    return magnitude.float().view(-1) / torch.cat(norms)


def tensor_of(values: Values) -> Tensor:
    """The same bits as a tensor; shares memory."""
    if values.dtype == "BF16":
        return torch.from_numpy(values.data.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(values.data)


def values_of(tensor: Tensor) -> Values:
    """The same bits as an array; shares memory with a tensor on the CPU."""
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        return Values(tensor.view(torch.int16).numpy().view("uint16"), "BF16")
    [name] = [name for name, dtype in TORCH_DTYPES.items() if dtype is tensor.dtype]
    return Values(tensor.numpy(), name)


def _difference(table: Tensor, base: BaseLinear, dtype: torch.dtype) -> ChangedRows:
    differs = []
    for begin in range(0, len(table), TABLE_CHUNK_ROWS):
        end = min(begin + TABLE_CHUNK_ROWS, len(table))
        own = base.weight_rows(begin, end).to("cpu", dtype)
        differs.append((table[begin:end] != own).any(dim=1))
    ids = torch.cat(differs).nonzero()[:, 0]
    return ChangedRows(tuple(ids.tolist()), values_of(table[ids]))


def _tensor(info: TensorInfo | None, read: Read) -> Tensor:
    assert info is not None, "the plan asked for it"
    return tensor_of(read(info))
