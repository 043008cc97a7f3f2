"""Rows of its own and LoRA at the embedding: the fast paths against the reference."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex_services.worker.ops.lora import reference
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.cpu import NativeLora
from loraplex_services.worker.ops.lora.cpu_records import Records
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.ops.lora.tables import SiteDelta, Slice, Tile
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from tests.worker.native.isas import ISAS, PAIRED, native_choosing

SITE, VOCAB, WIDTH, RANK = 0, 50, 12, 5
aten = torch.ops.aten
ROW_IDS = [3, 4, 17, 49]


@pytest.fixture(params=["torch", *ISAS, *PAIRED])
def fast(request):
    """`add_lora` and `add_lora_embedding`."""
    if request.param == "torch":
        yield portable.add_lora, portable.add_lora_embedding
        return
    with native_choosing(request.param) as library:
        lora = NativeLora(library)
        yield lora.add_lora, lora.add_lora_embedding


def batch_of(runs, delta):
    table = {(run.slot, SITE): delta for run in runs[:1]}
    return LoraBatch(runs, table, Records(table, SITE + 1))


def tiles_of(matrix: torch.Tensor, num_rows: int) -> tuple[Tile, ...]:
    """A matrix cut every `num_rows` rows and in two halves of columns, in one buffer with gaps."""
    half = matrix.shape[1] // 2
    buffer, position, tiles = matrix.new_full((2 * matrix.numel(),), torch.nan), 3, []
    for begin, end in [(0, half), (half, matrix.shape[1])]:
        for row in range(0, len(matrix), num_rows):
            part = matrix[row : row + num_rows, begin:end]
            data = buffer[position : position + part.numel()].view_as(part).copy_(part)
            position += part.numel() + 1
            tiles.append(Tile(row, row + len(part), begin, end, data))
    return tuple(tiles)


def delta_of(a: torch.Tensor, num_outputs: int, dtype: torch.dtype, **rows) -> SiteDelta:
    b = torch.randn(RANK, num_outputs).to(dtype)
    slices = (Slice(0, RANK, 0, num_outputs, 0.5),)
    return SiteDelta(slices, tiles_of(a, 7), tiles_of(b, 2), torch.full((RANK,), 0.5), **rows)


def own_rows(dtype: torch.dtype):
    rows = torch.randn(len(ROW_IDS), WIDTH).to(dtype)
    return {"rows": tiles_of(rows, 3), "row_ids": torch.tensor(ROW_IDS)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_rows", [False, True], ids=["lora", "lora-and-rows"])
def test_the_embedding_equals_the_naive_truth(fast, dtype, has_rows):
    torch.manual_seed(1)
    a = torch.randn(VOCAB, RANK).to(dtype)
    delta = delta_of(a, WIDTH, dtype, **(own_rows(dtype) if has_rows else {}))
    token_ids = torch.tensor([0, 3, 3, 17, 18, 49, 4, 5, 49, 2])
    lora = batch_of((RowRun(1, 0.5, 1, 7), RowRun(2, 1.0, 7, 9)), delta)
    expected = torch.randn(len(token_ids), WIDTH).to(dtype)
    actual = expected.clone()
    reference.add_lora_embedding(expected, token_ids, SITE, lora)
    fast[1](actual, token_ids, SITE, lora)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class Counting(TorchDispatchMode):
    """Counts operations, and refuses those for which a host waits for a GPU."""

    num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        assert func not in (aten.nonzero.default, aten._local_scalar_dense.default), func
        if func is aten.index.Tensor:
            assert all(index is None or index.dtype is torch.int64 for index in args[1])
        return func(*args, **(kwargs or {}))


def test_a_look_up_neither_waits_for_the_device_nor_takes_longer_for_more_tiles():
    """A table of a vocabulary may have a thousand tiles. A loop took 24 ms in each step."""
    lora = (RowRun(1, 0.5, 0, 3),)
    counts = []
    for num_tokens in (VOCAB, 20 * VOCAB):
        a = torch.randn(num_tokens, RANK)
        batch = batch_of(lora, delta_of(a, WIDTH, torch.float32, **own_rows(torch.float32)))
        with Counting() as counting:
            portable.add_lora_embedding(torch.zeros(3, WIDTH), torch.arange(3), SITE, batch)
        counts.append(counting.num_operations)
    assert counts[0] == counts[1]


def test_rows_of_a_head_do_not_make_the_host_wait_for_the_device():
    delta = delta_of(torch.randn(RANK, WIDTH), VOCAB, torch.float32, **own_rows(torch.float32))
    with Counting():
        batch = batch_of((RowRun(1, 1.0, 0, 3),), delta)
        portable.add_lora(torch.zeros(3, VOCAB), torch.randn(3, WIDTH), SITE, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head_equals_the_naive_truth(fast, dtype):
    torch.manual_seed(2)
    a = torch.randn(RANK, WIDTH).to(dtype)
    delta = delta_of(a, VOCAB, dtype, **own_rows(dtype))
    x = torch.randn(6, WIDTH).to(dtype)
    lora = batch_of((RowRun(1, 1.0, 2, 5),), delta)
    expected = torch.randn(6, VOCAB).to(dtype)
    before, actual = expected.clone(), expected.clone()
    reference.add_lora(expected, x, SITE, lora)
    fast[0](actual, x, SITE, lora)
    tolerance = 1e-5 if dtype is torch.float32 else 8e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert actual[[0, 1, 5]].equal(before[[0, 1, 5]])
