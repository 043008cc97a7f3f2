"""Updates with both matrices divided among ranks."""

import torch

from loraplex_services.worker.layers.sharded_lora import _order

CPU = torch.device("cpu")


def test_rank_rows_are_found_among_the_padded_shares_of_all_ranks():
    # Two ranks have 2 + 1 rows of the first slice and 2 + 1 of the second, each padded to 2.
    first, second = ["a0", "a1", "b0", "b1"], ["a2", "-", "b2", "-"]
    rows = [*first, *second]
    order = _order((3, 3), 2, CPU)
    assert [rows[i] for i in order] == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_the_order_of_rank_rows_is_copied_to_the_device_once():
    assert _order((8, 4, 8), 4, CPU) is _order((8, 4, 8), 4, CPU)
