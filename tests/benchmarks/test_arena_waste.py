"""Adapters leave little of their part of the arena empty, as placed by the worker's packer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scheduling.arena_waste import RANKS, TARGETS, adapters, left_empty
from loraplex_services.worker.types.extents import count_pages_per_block

BYTES_PER_RANK = {"q, v": 851_968, "attention": 1_703_936, "every linear": 5_242_880}


@pytest.mark.parametrize("targets", TARGETS)
def test_every_rank_leaves_less_than_a_fiftieth_of_its_pages_empty(
    tmp_path: Path, targets: str
) -> None:
    block_bytes, sizes = adapters(tmp_path, "Llama-3-8B", TARGETS[targets], RANKS)
    page_bytes = block_bytes // count_pages_per_block(block_bytes)
    assert [size.num_bytes for size in sizes] == [rank * BYTES_PER_RANK[targets] for rank in RANKS]
    for size in sizes:
        assert 0.98 < size.num_bytes / (size.num_pages * page_bytes) <= 1


def test_small_adapters_fill_the_blocks_that_they_share(tmp_path: Path) -> None:
    block_bytes, [smallest, *_] = adapters(tmp_path, "Llama-3-8B", TARGETS["q, v"], RANKS)
    assert left_empty([smallest], block_bytes) < 0.02
