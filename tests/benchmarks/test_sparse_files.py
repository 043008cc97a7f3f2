"""The store of `serving.tiers`, whose objects take less space than they have bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.serving.sparse_files import SparseStore

NUM_BYTES = 1 << 20


def test_an_object_of_zeros_takes_hardly_any_space_and_reads_as_it_was_put(tmp_path: Path) -> None:
    data = bytes(NUM_BYTES) + b"end"
    store = SparseStore(tmp_path)
    asyncio.run(store.put("blobs/one", data))
    [path] = (tmp_path / "blobs").iterdir()
    assert path.read_bytes() == data
    assert 512 * path.stat().st_blocks < NUM_BYTES / 8
