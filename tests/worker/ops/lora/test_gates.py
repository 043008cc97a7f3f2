"""Updates of gates that are applied at once, on AMX."""

import itertools
import random

import pytest
import torch

from loraplex_services.worker.native.bindings import ROUND_BYTES
from loraplex_services.worker.native.isa import AMX, host_isas
from loraplex_services.worker.ops.linear.cpu import GATES, GateLinear, TiledLinear
from loraplex_services.worker.ops.lora.cpu import NativeLora
from loraplex_services.worker.ops.lora.runs import RowRun
from tests.worker.native.isas import native
from tests.worker.ops.lora.test_lora import SITE, batch_of, random_delta

if AMX not in host_isas():
    pytest.skip("this processor lacks AMX", allow_module_level=True)
WIDTH, NUM_INPUTS = 176, 96
ROUND_WIDTH = ROUND_BYTES // 2
"""Rows of bfloat16 that `new_rows` moves apart."""


def table_of(stored, width=WIDTH):
    rng = random.Random(6)
    return {(s, SITE): random_delta(rng, NUM_INPUTS, 2 * width, stored) for s in range(4)}


@pytest.mark.parametrize("operation", GATES, ids=lambda operation: operation.name)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(1,), (2, 3), (2, 64, 1, 132), (64, 97)], ids=str)
@pytest.mark.parametrize("width", [WIDTH, ROUND_WIDTH])
def test_gates_applied_with_updates_have_the_bits_of_gates_applied_after_them(
    operation, stored, lengths, width
):
    torch.manual_seed(7)
    amx, table = native(AMX), table_of(stored, width)
    gates = GateLinear(amx, torch.randn(2 * width, NUM_INPUTS).bfloat16() / 8, operation)
    ends = list(itertools.accumulate(lengths, initial=1))  # rows around these are the base's
    runs = [RowRun(slot, 0.5, *run) for slot, run in enumerate(itertools.pairwise(ends))]
    lora = batch_of(runs, table)
    x = torch.randn(ends[-1] + 90, NUM_INPUTS).bfloat16()
    y, update = gates.apply(x), NativeLora(amx)
    update.add_lora(y, x, SITE, lora)
    expected = amx.elementwise(operation, *y.chunk(2, dim=-1))
    actual = update.add_gated(gates, x, SITE, lora)
    assert actual is not None
    assert actual.view(torch.int16).equal(expected.view(torch.int16))
    assert not actual[1].equal(gates.gated(x)[1])


def test_gates_are_applied_where_no_adapter_changes_the_site():
    amx, table = native(AMX), table_of(torch.bfloat16)
    gates = GateLinear(amx, torch.randn(2 * WIDTH, NUM_INPUTS).bfloat16(), min(GATES))
    x = torch.randn(130, NUM_INPUTS).bfloat16()
    lora = batch_of([RowRun(0, 1.0, 3, 90)], table)
    actual = NativeLora(amx).add_gated(gates, x, SITE - 1, lora)
    assert actual is not None
    assert actual.equal(gates.gated(x))


def test_weights_without_joined_gates_are_left_to_others():
    amx, table = native(AMX), table_of(torch.bfloat16)
    x, lora = torch.randn(3, NUM_INPUTS).bfloat16(), batch_of([RowRun(0, 1.0, 0, 2)], table)
    base = TiledLinear(amx, torch.randn(2 * WIDTH, NUM_INPUTS).bfloat16())
    assert NativeLora(amx).add_gated(base, x, SITE, lora) is None
