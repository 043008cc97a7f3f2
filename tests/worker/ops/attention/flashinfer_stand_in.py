"""A stand-in for `flashinfer.BatchPrefillWithPagedKVCacheWrapper` where there is no GPU.

It is written from FlashInfer's documentation and argument checks as of release 0.7.2. It checks
what it is given and computes with torch. It shows that our backend agrees with this reading of the
documentation. That the real library agrees is shown where it is installed.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

RECOMMENDED_WORKSPACE_BYTES = 128 << 20


def check_int32(name: str, values: Tensor, num: int, device: str) -> list[int]:
    assert values.dtype == torch.int32, (name, values.dtype)
    assert values.shape == (num,) and values.is_contiguous(), (name, values.shape)
    assert values.device.type == device, (name, values.device)
    return values.tolist()


class StandIn:
    """Its arguments have the names, order and meaning of FlashInfer's."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.nbytes >= RECOMMENDED_WORKSPACE_BYTES
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert (kv_layout, use_cuda_graph, backend) == ("HND", False, "fa2")
        self._device = float_workspace_buffer.device.type
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        seq_lens: Tensor | None = None,
    ) -> None:
        num = len(qo_indptr) - 1
        queries = check_int32("qo_indptr", qo_indptr, num + 1, "cpu")
        pages = check_int32("paged_kv_indptr", paged_kv_indptr, num + 1, "cpu")
        last_lens = check_int32("paged_kv_last_page_len", paged_kv_last_page_len, num, "cpu")
        check_int32("paged_kv_indices", paged_kv_indices, pages[-1], self._device)
        assert queries[0] == pages[0] == 0
        assert all(begin < end for begin, end in itertools.pairwise(queries))
        assert all(begin < end for begin, end in itertools.pairwise(pages))
        assert all(1 <= last <= page_size for last in last_lens)
        counts = [end - begin for begin, end in itertools.pairwise(pages)]
        lens = [(n - 1) * page_size + last for n, last in zip(counts, last_lens, strict=True)]
        if seq_lens is not None:
            assert check_int32("seq_lens", seq_lens, num, "cpu") == lens
        rows = [end - begin for begin, end in itertools.pairwise(queries)]
        assert all(n <= length for n, length in zip(rows, lens, strict=True))
        assert num_qo_heads % num_kv_heads == 0 and head_dim_qk in (64, 128, 256)
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert window_left >= -1 and (logits_soft_cap is None or logits_soft_cap > 0)
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk
        self._queries, self._pages, self._blocks = queries, pages, paged_kv_indices.clone()
        self._lens, self._page_size, self._dtype = lens, page_size, q_data_type
        self._causal, self._window_left, self._cap = causal, window_left, logits_soft_cap
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.num_plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        num_heads, num_kv_heads, head_dim = self._heads
        assert q.shape == (self._queries[-1], num_heads, head_dim) and q.dtype == self._dtype
        assert q.stride(2) == 1 and q.stride(1) == head_dim
        assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
        assert out.is_contiguous()
        keys, values = paged_kv_cache
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        for plane in paged_kv_cache:
            assert plane.shape[1:] == (num_kv_heads, self._page_size, head_dim)
            assert plane.dtype == q.dtype
            assert plane.data_ptr() % 16 == 0 and plane.stride(0) * plane.itemsize % 16 == 0
        assert ((self._blocks >= 0) & (self._blocks < len(keys))).all(), "a page that is not there"
        for index, length in enumerate(self._lens):
            blocks = self._blocks[self._pages[index] : self._pages[index + 1]].long()
            rows = slice(self._queries[index], self._queries[index + 1])
            k, v = (
                plane[blocks].transpose(1, 2).flatten(0, 1)[:length] for plane in paged_kv_cache
            )
            out[rows] = self._attend(q[rows], k, v)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The last `len(q)` positions over all of `k`. Scores of hidden keys are replaced, but
        their values are multiplied with 0, as in a tile of FlashInfer's, so NaN goes through."""
        num_shared = self._heads[0] // self._heads[1]
        k, v = (x.float().repeat_interleave(num_shared, dim=1) for x in (k, v))
        scores: Any = torch.einsum("qhd,khd->hqk", q.float(), k) * self._scale
        if self._cap is not None:
            scores = self._cap * torch.tanh(scores / self._cap)
        position = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        key = torch.arange(len(k), device=q.device)
        hidden = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
        if self._causal:
            hidden |= key > position
        if self._window_left >= 0:
            hidden |= key < position - self._window_left
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
