"""Where ranks divide both matrices of an adapter's pairs."""

from dataclasses import replace

import pytest

from loraplex_services.worker.types.division import COSTS, Division, MoveCosts
from loraplex_services.worker.types.sharding import WHOLE, Cut

HIDDEN, KV, INNER = 4096, 1024, 14336
QKV = (HIDDEN, [HIDDEN, KV, KV], Cut(outputs=((HIDDEN, 32), (KV, 8), (KV, 8))))
OUT = (HIDDEN, [HIDDEN], Cut(inputs=((HIDDEN, 32),)))
GATE_UP = (HIDDEN, [INNER, INNER], Cut(outputs=((INNER, INNER),) * 2))
DOWN = (INNER, [HIDDEN], Cut(inputs=((INNER, INNER),)))
SITES = (QKV, OUT, GATE_UP, DOWN)
"""Of Llama-3-8B."""
GPU = Division(2, False, COSTS["cuda"], 2, 64, 256, 4096)
CPU = replace(GPU, costs=COSTS["cpu"], item_bytes=4)


def choices(division: Division) -> list[bool]:
    return [division.divides_both(*site) for site in SITES]


def test_an_adapter_of_each_site_is_read_and_sent_as_the_decision_says():
    """N = 4, r = 8, float32: A of q, k, v is whole or a quarter, and B a quarter."""
    costs = MoveCosts(1.0, 2.0, 3.0, 5.0)
    division = Division(4, False, costs, 4, 8, 16, 16)
    a, b = 8 * 3 * HIDDEN, 8 * (HIDDEN + 2 * KV)
    assert division.one_s(costs, *QKV, 1) == 4 * (a + b / 4)
    sent = 3 / 4 * 16 * 3 * 8 * 4
    assert division.both_s(costs, *QKV, 16, 2) == 2 * 4 * (a + b) / 4 + sent / 2 + 3 + 2 * 5
    a, b = 8 * INNER, 8 * HIDDEN
    assert division.one_s(costs, *DOWN, 1) == 4 * (a / 4 + b)
    sent = 2 * 3 / 4 * 16 * 8 * 4
    assert division.both_s(costs, *DOWN, 16, 2) == 2 * 4 * (a + b) / 4 + sent / 2 + 3 + 2 * 5


def test_torch_moves_numbers_in_half_precision_five_times():
    costs = MoveCosts(1.0, 1.0, 0.0, 0.0)
    division = Division(2, False, costs, 2, 8, 1, 1)
    assert division.both_s(costs, *OUT, 0, 1) == 5 * 2 * 8 * 2 * HIDDEN / 2


@pytest.mark.parametrize("rank", [16, 64, 256])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_base_of_this_size_in_half_precision_has_one_matrix_divided(rank, num_ranks):
    for division in (GPU, replace(CPU, item_bytes=2)):
        assert not any(choices(replace(division, max_rank=rank, num_ranks=num_ranks)))


def test_in_float32_on_a_cpu_large_ranks_divide_the_sites_of_most_inputs():
    assert choices(replace(CPU, max_rank=64)) == [False] * 4
    assert choices(replace(CPU, max_rank=128)) == [False] * 4
    assert choices(replace(CPU, max_rank=256)) == [True, False, True, False]
    assert choices(replace(CPU, max_rank=1024)) == [True] * 4


def test_what_a_link_costs_changes_the_choice():
    slow = replace(COSTS["cpu"], collective_s=1.0)
    assert choices(replace(CPU, max_rank=1024, costs=slow)) == [False] * 4
    slow = replace(COSTS["cpu"], link_bytes_per_s=1e6)
    assert choices(replace(CPU, max_rank=1024, costs=slow)) == [False] * 4
    slow = replace(COSTS["cpu"], update_s=1.0)
    assert choices(replace(CPU, max_rank=1024, costs=slow)) == [False] * 4


def test_the_flag_divides_both_wherever_ranks_divide_a_site():
    full = replace(GPU, is_full=True)
    assert choices(full) == [True] * 4
    assert not full.divides_both(HIDDEN, [8], WHOLE)
    assert choices(replace(full, num_ranks=1)) == [False] * 4
    assert choices(replace(full, costs=None)) == [True] * 4
    assert choices(replace(CPU, max_rank=1024, costs=None)) == [False] * 4
