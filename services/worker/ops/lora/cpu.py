"""The low-rank update in C++ (`native/src/lora.cpp`): all runs of a site in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_services.worker.native.bindings import Native, row_stride
from loraplex_services.worker.ops.linear.cpu import GateLinear
from loraplex_services.worker.ops.linear.torch import BaseLinear
from loraplex_services.worker.ops.lora.cpu_records import pack_runs
from loraplex_services.worker.ops.lora.tables import SiteDelta
from loraplex_services.worker.ops.lora.torch import look_up, replace_looked_up
from loraplex_services.worker.ops.lora.worklist import LoraBatch


class NativeLora:
    """The updates of one loaded library. The result of a row does not depend on the other rows."""

    def __init__(self, native: Native) -> None:
        self._native = native

    def __call__(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """See `add_lora`."""
        self.add_lora(y, x, site_id, lora)

    def add_gated(
        self, base: BaseLinear, x: Tensor, site_id: int, lora: LoraBatch
    ) -> Tensor | None:
        """See `GatedUpdate`."""
        if not isinstance(base, GateLinear) or not lora.adds_only:
            return None
        rows = base.apply(x), x, site_id, lora.packed_runs
        return self._native.add_lora_gates(base.operation, *rows)

    def add_lora(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """See `torch.add_lora`; y and x float32 or bfloat16, tiles of any float dtype."""
        if not lora.runs:
            return
        if lora.replaces_rows(site_id):
            self._replace_outputs(y, x, site_id, lora)
        self._native.add_lora(y, x, site_id, lora.packed_runs)

    def add_lora_embedding(
        self, y: Tensor, token_ids: Tensor, site_id: int, lora: LoraBatch
    ) -> None:
        """See `torch.add_lora_embedding`; y float32 or bfloat16."""
        for run in lora.runs:
            delta = lora.table.get((run.slot, site_id))
            if delta is None:
                continue
            assert lora.records is not None, "C++ kernels need records"
            out, ids = y[run.begin : run.end], token_ids[run.begin : run.end]
            if delta.row_ids is not None:
                replace_looked_up(out, ids, delta)
            own = pack_runs([(lora.records.address(run.slot), 0, len(ids), run.coef)])
            columns = look_up(ids, delta)
            rows = out, row_stride(out), out.shape[1], out.dtype
            self._native.call("add_lora_embedding", columns, delta.rank, *rows, site_id, own)

    def _replace_outputs(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        for run in lora.runs:
            delta = lora.table.get((run.slot, site_id))
            if delta is not None and delta.row_ids is not None:
                own = self._own_outputs(x[run.begin : run.end], delta, len(delta.row_ids))
                y[run.begin : run.end, delta.row_ids] = own.to(y.dtype)

    def _own_outputs(self, x: Tensor, delta: SiteDelta, num_rows: int) -> Tensor:
        """Float32 `[T, n]`: the outputs of the adapter's own rows of the weight."""
        products = torch.zeros(len(x), num_rows)
        for tile in delta.rows:
            assert tile.data.is_contiguous(), tile.data.stride()
            columns, sums = x[:, tile.col_begin :], products[:, tile.row_begin :]
            rows = columns, row_stride(x), x.dtype, len(x)
            own = tile.data, tile.data.dtype, *tile.data.shape
            self._native.call("add_products", *rows, *own, sums, row_stride(products))
        return products
