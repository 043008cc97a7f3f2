"""Adapters leave little of their blocks empty, as placed by the worker's packer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scheduling.arena_waste import RANKS, TARGETS, filled


@pytest.mark.parametrize("targets", TARGETS)
def test_ranks_eight_to_sixty_four_waste_less_than_a_twentieth(
    tmp_path: Path, targets: str
) -> None:
    sizes = filled(tmp_path, "Llama-3-8B", TARGETS[targets], RANKS)
    num_bytes, held_bytes = (sum(column) for column in zip(*sizes, strict=True))
    assert num_bytes / held_bytes > 0.95
    per_rank = {"attention": 1_703_936, "every linear": 5_242_880}[targets]
    assert [full for full, _ in sizes] == [rank * per_rank for rank in RANKS]
