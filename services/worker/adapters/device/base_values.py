"""Computes the parts of an image that depend on the base's weights: DoRA gains, and differences
from these weights.

This happens in the engine process, concurrently with steps, once for each image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TensorInfo
from loraplex_services.worker.adapters.pack.packing import ChangedRows
from loraplex_services.worker.adapters.pack.site_plan import Part, Role
from loraplex_services.worker.adapters.pack.values import Read, Values
from loraplex_services.worker.model.decoder import SiteWeights
from loraplex_services.worker.ops.linear.torch import WeightRows
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.sites import EMBEDDING, NORM

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""torch dtypes by safetensors name."""
GAIN_CHUNK_ROWS = 1024
"""Rows of W + s B A that exist at once while a DoRA gain is computed."""
TABLE_CHUNK_ROWS = 8192
"""Rows of a saved weight that are compared with the base's at a time."""


class SiteValues:
    """Implements `packing.BaseValues` over a model's weights."""

    def __init__(self, sites: SiteWeights, layout: AdapterLayout, device: torch.device) -> None:
        self._sites = sites
        self._dtype = TORCH_DTYPES[layout.dtype]
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":  # one that steps do not wait for
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @torch.inference_mode()
    def changed_rows(self, module: AdapterModule, read: Read) -> ChangedRows | None:
        """The rows of the module's weight that differ from the base's. The module has single rows,
        a complete weight, or the table under its LoRA matrices, which usually equals the base's."""
        with torch.cuda.stream(self._stream):
            return self._changed_rows(module, read)

    def _changed_rows(self, module: AdapterModule, read: Read) -> ChangedRows | None:
        site_range = self._sites.table.modules[module.name]
        site = self._sites.table.sites[site_range.site_id]
        if site.kind == NORM:
            return None
        changed = None
        weight = module.full or module.base_copy
        if weight is not None:
            begin = 0 if site.kind == EMBEDDING else site_range.out_begin
            num_own = site.in_features if site.kind == EMBEDDING else site_range.out_features
            base = self._sites.linears[site_range.site_id]
            if module.full is None:  # a copy of the published, unquantised weight
                base = self._sites.published.get(site_range.site_id, base)
            own = _Rows(base, begin, num_own)
            changed = _difference(tensor_of(read(weight)).to(self._dtype), own, self._dtype)
        if module.token_delta is None:
            return changed
        return _overlaid(
            changed, module.token_ids, tensor_of(read(module.token_delta)), self._dtype
        )

    @torch.inference_mode()
    def value(self, part: Part, site_id: int, read: Read) -> Values:
        """float32 `[1, out]`."""
        module = part.module
        if part.role is Role.NORM:
            offset = self._sites.norm_offsets.get(site_id, 0.0)
            return values_of((_tensor(module.full, read).float() + offset)[None])
        if part.role is Role.BIAS:
            trained = _tensor(module.bias, read).float()
            rows = slice(part.col_begin, part.col_begin + len(trained))
            return values_of((trained - self._sites.biases[site_id][rows].float().cpu())[None])
        assert part.role is Role.GAIN, part.role
        with torch.cuda.stream(self._stream):
            return values_of(self._gain(part, site_id, read)[None].cpu())

    def _gain(self, part: Part, site_id: int, read: Read) -> Tensor:
        module, site = part.module, self._sites.table.sites[site_id]
        is_embedding = site.kind == EMBEDDING
        num_own = site.in_features if is_embedding else part.matrix.num_columns
        changed = self.changed_rows(module, read)
        weight = _Rows(self._sites.linears[site_id], part.col_begin, num_own, changed)
        a = _tensor(module.embedding_a if is_embedding else module.a, read).to(self._device)
        b = _tensor(module.embedding_b if is_embedding else module.b, read).to(self._device)
        magnitude = _tensor(module.magnitude, read).to(self._device)
        gain_of = embedding_gain if is_embedding else dora_gain
        return gain_of(weight.weight_rows, a, b, module.scale, magnitude)


class _Rows:
    """Some rows of the base's weight, or the adapter's where it replaces or adds rows."""

    def __init__(
        self, base: WeightRows, begin: int, num_own: int, changed: ChangedRows | None = None
    ) -> None:
        """Up to `num_own` of the base's rows, from `begin` on."""
        self._base = base
        self.begin = begin
        self.num_own = min(num_own, base.out_features - begin)
        self._ids = torch.tensor(changed.row_ids if changed else (), dtype=torch.int64) - begin
        self._rows = tensor_of(changed.rows).float() if changed else torch.empty(0)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        last = max(begin, min(end, self.num_own))
        rows = self._base.weight_rows(self.begin + begin, self.begin + last)
        if end > last:
            rows = torch.cat((rows, rows.new_zeros(end - last, self._base.in_features)))
        first, behind = torch.searchsorted(self._ids, torch.tensor([begin, end])).tolist()
        if first < behind:
            rows = rows.clone()
            rows[self._ids[first:behind] - begin] = self._rows[first:behind].to(rows.device)
        return rows


RowsOf = Callable[[int, int], Tensor]
"""Rows [begin, end) of a weight, float32."""


def dora_gain(weight_rows: RowsOf, a: Tensor, b: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """m / ||W + scale * B A|| by row, in row chunks; float32 `[out]`.

    Args:
        weight_rows: of the module's weight `[out, in]`.
        a: `[rank, in]`. b: `[out, rank]`. magnitude: `[out]` or `[out, 1]`.

    Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", eq. 5.
    """
    a, b = a.float(), b.float()
    norms = []
    for begin in range(0, len(b), GAIN_CHUNK_ROWS):
        end = min(begin + GAIN_CHUNK_ROWS, len(b))
        weight = weight_rows(begin, end)
        norms.append(torch.linalg.vector_norm(weight + scale * (b[begin:end] @ a), dim=1))
    return magnitude.float().view(-1) / torch.cat(norms)


def embedding_gain(
    weight_rows: RowsOf, a: Tensor, b: Tensor, scale: float, magnitude: Tensor
) -> Tensor:
    """Gain of DoRA by column of a table `[tokens, width]`; float32 `[width]`.

    Args:
        weight_rows: of the table.
        a: `[rank, tokens]`. b: `[width, rank]`. magnitude: `[width]`.
    """
    a, b = a.float(), b.float()
    squares = torch.zeros(len(b), dtype=torch.float64, device=b.device)
    for begin in range(0, a.shape[1], TABLE_CHUNK_ROWS):
        end = min(begin + TABLE_CHUNK_ROWS, a.shape[1])
        table = weight_rows(begin, end) + scale * (a[:, begin:end].T @ b.T)
        squares += table.double().square().sum(dim=0)
    return magnitude.float().view(-1) / squares.sqrt().float()


def tensor_of(values: Values) -> Tensor:
    """View an array as a tensor of the same bits; shares memory."""
    if values.dtype == "BF16":
        return torch.from_numpy(values.data.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(values.data)


def values_of(tensor: Tensor) -> Values:
    """View a tensor as an array of the same bits; shares memory with a tensor on the CPU."""
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        return Values(tensor.view(torch.int16).numpy().view("uint16"), "BF16")
    [name] = [name for name, dtype in TORCH_DTYPES.items() if dtype is tensor.dtype]
    return Values(tensor.numpy(), name)


def _difference(weight: Tensor, own: _Rows, dtype: torch.dtype) -> ChangedRows:
    """Rows beyond the base's last one are different from it."""
    differs = []
    for begin in range(0, len(weight), TABLE_CHUNK_ROWS):
        end = min(begin + TABLE_CHUNK_ROWS, len(weight))
        base_rows = own.weight_rows(begin, end).to("cpu", dtype)
        changed = (weight[begin:end] != base_rows).any(dim=1)
        changed[max(0, own.num_own - begin) :] = True
        differs.append(changed)
    ids = torch.cat(differs).nonzero()[:, 0]
    return ChangedRows(tuple((ids + own.begin).tolist()), values_of(weight[ids]))


def _overlaid(
    changed: ChangedRows | None, ids: tuple[int, ...], rows: Tensor, dtype: torch.dtype
) -> ChangedRows:
    """The weight below single rows, and the rows `[len(ids), width]` that replace `ids`."""
    by_id = dict(zip(changed.row_ids, tensor_of(changed.rows), strict=True)) if changed else {}
    by_id |= dict(zip(ids, rows.to(dtype), strict=True))
    order = sorted(by_id)
    return ChangedRows(tuple(order), values_of(torch.stack([by_id[row_id] for row_id in order])))


def _tensor(info: TensorInfo | None, read: Read) -> Tensor:
    assert info is not None, "the plan asked for it"
    return tensor_of(read(info))
