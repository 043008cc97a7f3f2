"""Stacked adapters in plain torch: which stacks are kept, and that neighbours stay apart."""

import dataclasses
import math

import pytest
import torch

from services.worker.kernels.lora import naive, stacked
from services.worker.kernels.lora.runs import row_runs
from services.worker.kernels.lora.stacked import StackedLora
from services.worker.kernels.lora.tables import SiteDelta, Slice, Tile
from services.worker.kernels.lora.worklist import LoraBatch

SITE, NUM_INPUTS, NUM_OUTPUTS = 0, 24, 40
PARTS = ((0, 16), (16, 24), (24, 40))
"""Outputs of the modules that share the site."""


def random_delta(rank: int, parts=PARTS) -> SiteDelta:
    """Of one rank at some of the site's modules."""
    slices, b = [], []
    for i, (begin, end) in enumerate(parts):
        slices.append(Slice(i * rank, rank, begin, end - begin, 0.5 + i))
        b.append(Tile(i * rank, (i + 1) * rank, begin, end, torch.randn(rank, end - begin)))
    total = rank * len(parts)
    a = Tile(0, total, 0, NUM_INPUTS, torch.randn(total, NUM_INPUTS) / math.sqrt(NUM_INPUTS))
    scales = torch.cat([torch.full((part.rank_len,), part.scale) for part in slices])
    return SiteDelta(tuple(slices), (a,), tuple(b), scales)


def table_of(*ranks: int) -> dict[tuple[int, int], SiteDelta]:
    torch.manual_seed(len(ranks))
    return {(slot, SITE): random_delta(rank) for slot, rank in enumerate(ranks)}


def batch(table, slots, coef=1.0) -> LoraBatch:
    return LoraBatch(row_runs((1, [(slot, coef)]) for slot in slots), table)


def check(lora: StackedLora, of: LoraBatch, num_rows: int) -> None:
    """One update equals the naive truth."""
    x, expected = torch.randn(num_rows, NUM_INPUTS), torch.randn(num_rows, NUM_OUTPUTS)
    actual = expected.clone()
    naive.add_lora(expected, x, SITE, of)
    lora.add_lora(actual, x, SITE, of)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.fixture
def made(monkeypatch):
    """The slots of each stack that was made."""
    made = []
    make = stacked.make_stack

    def record(members, *args):
        made.append(sorted(members))
        return make(members, *args)

    monkeypatch.setattr(stacked, "make_stack", record)
    return made


def test_a_stack_serves_later_steps_with_the_same_adapters_or_fewer(made):
    table, lora = table_of(4, 8, 4), StackedLora()
    check(lora, batch(table, [0, 1, 1, 2]), 4)
    check(lora, batch(table, [2, 0, 1]), 3)
    check(lora, batch(table, [1, 1, 2], coef=-0.5), 3)
    check(lora, batch(table, [0, 0]), 2)  # one adapter needs none
    assert made == [[0, 1, 2]]


def test_a_new_adapter_and_one_far_too_large_a_stack_make_another(made):
    table, lora = table_of(2, 16, 2), StackedLora()
    check(lora, batch(table, [0, 1]), 2)
    check(lora, batch(table, [0, 1, 2]), 3)
    check(lora, batch(table, [0, 2]), 2)
    assert made == [[0, 1], [0, 1, 2], [0, 2]]


def test_a_slot_that_holds_another_adapter_now_is_read_anew(made):
    table, lora = table_of(4, 4), StackedLora()
    check(lora, batch(table, [0, 1]), 2)
    table[0, SITE] = random_delta(7, PARTS[1:])
    check(lora, batch(table, [0, 1]), 2)
    assert made == [[0, 1], [0, 1]]


def test_long_runs_and_stacks_beyond_the_limit_are_computed_one_by_one(made, monkeypatch):
    table = table_of(4, 4)
    check(StackedLora(1000), batch(table, [0, 1]), 2)
    monkeypatch.setattr(stacked, "WORTH_OF_A_RUN", 100)
    check(StackedLora(), batch(table, [0, 1]), 2)
    assert made == []


def test_copies_of_all_sites_stay_within_their_share(monkeypatch):
    kept, make = [], stacked.make_stack

    def keep(*args):
        kept.append(make(*args))
        return kept[-1]

    monkeypatch.setattr(stacked, "make_stack", keep)
    lora = StackedLora(80_000)
    for site in range(8):
        table = {(slot, site): random_delta(4, PARTS) for slot in range(3)}
        x, y = torch.randn(3, NUM_INPUTS), torch.zeros(3, NUM_OUTPUTS)
        lora.add_lora(y, x, site, batch(table, [0, 1, 2]))
    assert 0 < sum(stack.num_bytes for stack in kept) <= 80_000
    assert len(kept) < 8


def test_scales_that_differ_between_sites_are_each_sites_own():
    table, lora = table_of(4, 4), StackedLora()
    of = batch(table, [0, 1])
    check(lora, of, 2)
    first = table[0, SITE]
    slices = tuple(dataclasses.replace(part, scale=3 * part.scale) for part in first.slices)
    table[0, SITE] = SiteDelta(slices, first.a, first.b, first.scales * 3)
    check(lora, of, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_that_overflows_leaves_its_neighbours_alone(dtype):
    torch.manual_seed(0)
    huge = torch.full((2, NUM_INPUTS), 3e38)
    huge[1] *= -1
    plain, b = torch.randn(2, NUM_INPUTS).to(dtype), torch.randn(2, NUM_OUTPUTS).to(dtype)
    table = {
        (slot, SITE): SiteDelta(
            (Slice(0, 2, 0, NUM_OUTPUTS, 1.0),),
            (Tile(0, 2, 0, NUM_INPUTS, a),),
            (Tile(0, 2, 0, NUM_OUTPUTS, b),),
            torch.ones(2),
        )
        for slot, a in enumerate((huge.to(dtype), plain))
    }
    x = torch.randn(3, NUM_INPUTS).abs().to(dtype)
    y = torch.zeros(3, NUM_OUTPUTS, dtype=dtype)
    StackedLora().add_lora(y, x, SITE, batch(table, [0, 1, 1]))
    assert not y[0].isfinite().all()
    expected = x[1:].float() @ plain.float().T @ b.float()
    torch.testing.assert_close(y[1:].float(), expected, rtol=2e-2, atol=2e-1)
