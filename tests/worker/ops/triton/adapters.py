"""Adapters of random shape, packed into a small arena as the worker packs them."""

import itertools
import math
import random

import torch

from loraplex_services.worker.adapters.pack.tiles import Matrix, TileLayout
from loraplex_services.worker.adapters.pack.values import Values
from loraplex_services.worker.ops.lora.tables import SiteDelta, Slice, Tile
from loraplex_services.worker.types.extents import count_pages_per_block, extent_begins

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def slots_of_mix(mix: str, num_rows: int, num_adapters: int, rng: random.Random):
    """Slot of each row; None = base."""
    zipf = [1 / (i + 1) ** 1.5 for i in range(num_adapters)]
    return {
        "distinct": lambda: [i % num_adapters for i in range(num_rows)],
        "uniform": lambda: [rng.randrange(num_adapters) for _ in range(num_rows)],
        "zipf": lambda: rng.choices(range(num_adapters), zipf, k=num_rows),
        "identical": lambda: [1] * num_rows,
        "skewed": lambda: [0 if i else 1 for i in range(num_rows)],
        "none": lambda: [None] * num_rows,
        "half-base": lambda: [rng.choice([None, 1, 0]) for _ in range(num_rows)],
    }[mix]()


class PackedArena:
    """An arena of small blocks in shuffled order; matrices get the next free ones."""

    def __init__(self, num_blocks: int, block_bytes: int, device, rng: random.Random):
        self.data = torch.full((num_blocks, block_bytes), 0xFF, dtype=torch.uint8, device=device)
        self._layout = TileLayout(block_bytes)
        self._free = list(range(num_blocks))
        rng.shuffle(self._free)

    def put(self, matrix: torch.Tensor, row_begin=0, col_begin=0) -> list[Tile]:
        """Tiles of a matrix, moved to (row_begin, col_begin)."""
        num_rows, num_cols = matrix.shape
        shape = Matrix(num_rows, num_cols, matrix.itemsize)
        packing = self._layout.pack([shape])
        per_block = count_pages_per_block(len(self.data[0]))
        begins = extent_begins(packing.num_pages, per_block)
        blocks = [self._free.pop() for _ in range(-(-packing.num_pages // per_block))]
        page_bytes = len(self.data[0]) // per_block
        tiles = []
        for tile in packing.tiles[0]:
            rows, columns = tile.row_end - tile.row_begin, tile.col_end - tile.col_begin
            block, page = divmod(begins[tile.extent], per_block)
            begin = page * page_bytes + tile.offset_bytes
            raw = self.data[blocks[block]][begin : begin + rows * columns * matrix.itemsize]
            view = raw.view(matrix.dtype).view(rows, columns)
            view.copy_(matrix[tile.row_begin : tile.row_end, tile.col_begin : tile.col_end])
            tiles.append(
                Tile(
                    row_begin + tile.row_begin,
                    row_begin + tile.row_end,
                    col_begin + tile.col_begin,
                    col_begin + tile.col_end,
                    view,
                )
            )
        return tiles


def integers(matrix):
    """As packed with LORAPLEX_LORA_DTYPE=int8: int8, and a factor for each row."""
    values, factors = Values(matrix.float().numpy(), "F32").to_int8()
    return torch.from_numpy(values.data), torch.from_numpy(factors)


def random_delta(
    rng, arena, num_inputs, num_outputs, dtype, ranks=(1, 3, 16, 17, 64), int8=False
) -> SiteDelta:
    """Up to three slices of different ranks; absent outputs; vectors here and there."""
    cuts = sorted({0, rng.randrange(num_outputs + 1), rng.randrange(num_outputs + 1), num_outputs})
    slices, a, b, scales, rank = [], [], [], [], 0
    vectors = {"gains": [], "lora_biases": [], "biases": []}
    for begin, end in itertools.pairwise(cuts):
        for tiles in vectors.values():
            if rng.random() < 0.3:
                tiles += arena.put(torch.rand(1, end - begin) + 0.5, 0, begin)
        if rng.random() < 0.25 and slices:
            continue
        num_ranks, scale = rng.choice(ranks), rng.choice([0.25, 1.0, 2.0])
        slices.append(Slice(rank, num_ranks, begin, end - begin, scale))
        a_rows = (torch.randn(num_ranks, num_inputs) / math.sqrt(num_inputs)).to(dtype)
        b_rows = (torch.randn(num_ranks, end - begin) / 8).to(dtype)
        scales.append(torch.full((num_ranks,), scale))
        if int8:
            (a_rows, a_factors), (b_rows, b_factors) = integers(a_rows), integers(b_rows)
            scales[-1] *= a_factors * b_factors
        a += arena.put(a_rows, rank)
        b += arena.put(b_rows, rank, begin)
        rank += num_ranks
    all_scales = torch.cat(scales).to(arena.data.device)
    tiles_of = {name: tuple(tiles) for name, tiles in vectors.items()}
    return SiteDelta(tuple(slices), tuple(a), tuple(b), all_scales, **tiles_of)
