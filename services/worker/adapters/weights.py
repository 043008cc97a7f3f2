"""AdapterWeights: copies adapters into arena blocks and keeps the tables that kernels read.

It decides nothing: which adapter gets which slot and blocks is `AdapterCache`'s business. Tables
are sparse, keyed by (slot, site); tiles are views of the arena, never copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, TensorInfo
from services.worker.adapters.rows import ChangedRows, brings_rows, changed_rows
from services.worker.adapters.site_plan import ItemBytes, Part, Role, SitePlan, plan_sites
from services.worker.adapters.tiles import Packing, TileLayout, TilePlace
from services.worker.kernels.lora.tables import SiteDelta, Slice, Tile
from services.worker.layers.linear import BaseLinear
from services.worker.memory.buffer import ArenaBuffer
from services.worker.model.decoder import SiteWeights
from services.worker.model.sites import EMBEDDING, LM_HEAD

HALF_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
MAX_PLANNED = 64
"""Plans kept between asking for an adapter's blocks and loading it."""
GAIN_CHUNK_ROWS = 1024
"""Rows of W + s B A that exist at once while a DoRA gain is computed."""

ReadModules = Callable[[Path], Sequence[AdapterModule]]
"""Parses and checks a verified adapter folder against the base; reads headers only."""


class AdapterWeights:
    """The adapters of one base on one device."""

    def __init__(
        self,
        arena: ArenaBuffer,
        sites: SiteWeights,
        dtype: torch.dtype,
        read_modules: ReadModules,
        max_resident: int,
        keeps_half: bool = False,
    ) -> None:
        """`keeps_half`: A and B published in half precision stay so under a float32 model, since
        its kernels widen them; exact, and half the bytes."""
        self.table: dict[tuple[int, int], SiteDelta] = {}
        self._arena = arena
        self._sites = sites.table
        self._linears = sites.linears
        self._biases = sites.biases
        self._norm_offset = sites.norm_offset
        self._dtype = dtype
        self._read_modules = read_modules
        self._max_resident = max_resident
        self._layout = TileLayout(arena.block_bytes)
        self._keeps_half = keeps_half
        self._sites_of_slot: dict[int, tuple[int, ...]] = {}
        self._planned: dict[Path, tuple[list[SitePlan], Packing]] = {}

    def blocks_needed(self, folder: Path) -> int:
        """Blocks that the adapter fills. Reads headers, and whole tables if it brings any."""
        plans, packing = self._plan_and_pack(folder)
        while len(self._planned) >= MAX_PLANNED:
            del self._planned[next(iter(self._planned))]
        self._planned[folder] = plans, packing
        return packing.num_blocks

    def load(self, slot: int, folder: Path, blocks: Sequence[int]) -> None:
        """Copy the adapter into `blocks` and enter it under `slot`.

        Nothing is entered when reading fails; the blocks' bytes are undefined then.
        """
        assert 0 <= slot < self._max_resident, (slot, self._max_resident)
        assert slot not in self._sites_of_slot, f"slot {slot} is in use"
        planned = self._planned.pop(folder, None)
        plans, packing = self._plan_and_pack(folder) if planned is None else planned
        assert packing.num_blocks == len(blocks), (packing.num_blocks, len(blocks))
        deltas, placed = {}, iter(packing.tiles)
        with safe_open(str(folder / TENSOR_FILE), framework="pt") as file:
            for plan in plans:
                tiles = [(part, next(placed)) for part in plan.parts]
                deltas[slot, plan.site_id] = self._load_site(plan, tiles, blocks, file)
        self.table.update(deltas)
        self._sites_of_slot[slot] = tuple(plan.site_id for plan in plans)

    def unload(self, slot: int) -> None:
        """Take `slot` out of the tables; its blocks may be reused at once."""
        for site_id in self._sites_of_slot.pop(slot):
            del self.table[slot, site_id]

    def _plan_and_pack(self, folder: Path) -> tuple[list[SitePlan], Packing]:
        plans = self._plan(folder)
        return plans, self._layout.pack([part.matrix for plan in plans for part in plan.parts])

    def _plan(self, folder: Path) -> list[SitePlan]:
        modules = self._read_modules(folder)
        changed: dict[str, tuple[int, ...]] = {}
        if any(map(self._replaces_rows, modules)):
            with safe_open(str(folder / TENSOR_FILE), framework="pt") as file:
                for module in filter(self._replaces_rows, modules):
                    changed[module.name] = self._changed_rows(module, file).token_ids
        sizes = ItemBytes(lambda info: self._lora_dtype(info).itemsize, self._dtype.itemsize)
        return plan_sites(modules, self._sites, sizes, changed)

    def _lora_dtype(self, info: TensorInfo) -> torch.dtype:
        """What A and B are packed as."""
        keeps = self._keeps_half and self._dtype is torch.float32
        return HALF_DTYPES.get(info.dtype, self._dtype) if keeps else self._dtype

    def _replaces_rows(self, module: AdapterModule) -> bool:
        site_id = self._sites.places[module.name].site_id
        return self._sites.sites[site_id].kind in (EMBEDDING, LM_HEAD) and brings_rows(module)

    def _changed_rows(self, module: AdapterModule, file: safe_open) -> ChangedRows:
        base = self._linears[self._sites.places[module.name].site_id]
        return changed_rows(module, base, self._dtype, lambda info: _tensor(file, info))

    def _dtype_of(self, part: Part) -> torch.dtype:
        """What a part is packed as."""
        module = part.module
        match part.role:
            case Role.A:
                return self._lora_dtype(_known(module.embedding_a or module.a))
            case Role.B:
                return self._lora_dtype(_known(module.embedding_b or module.b))
            case Role.ROWS:
                return self._dtype
        return torch.float32

    def _load_site(
        self,
        plan: SitePlan,
        placed: Sequence[tuple[Part, Sequence[TilePlace]]],
        blocks: Sequence[int],
        file: safe_open,
    ) -> SiteDelta:
        device = self._arena.data.device
        tiles: dict[Role, list[Tile]] = {role: [] for role in Role}
        row_ids: tuple[int, ...] = ()
        for part, places in placed:
            dtype = self._dtype_of(part)
            if part.role is Role.ROWS:
                changed = self._changed_rows(part.module, file)
                value, row_ids = changed.rows, changed.token_ids
            else:
                value = self._value(part, plan.site_id, file)
            for place in places:
                view = self._view(place, blocks, dtype)
                rows = slice(place.row_begin, place.row_end)
                view.copy_(value[rows, place.col_begin : place.col_end])
                tiles[part.role].append(_shifted(place, part, view))
        return SiteDelta(
            slices=plan.slices,
            a=_merged(tiles[Role.A]),
            b=_merged(tiles[Role.B]),
            scales=_scales(plan.slices, device),
            lora_biases=_merged(tiles[Role.LORA_BIAS]),
            gains=_merged(tiles[Role.GAIN]),
            biases=_merged(tiles[Role.BIAS]),
            norm=tuple(tiles[Role.NORM]),
            rows=_merged(tiles[Role.ROWS]),
            row_ids=torch.tensor(row_ids, device=device) if row_ids else None,
        )

    def _value(self, part: Part, site_id: int, file: safe_open) -> Tensor:
        """The matrix to be packed, as published or as computed; vectors are `[1, out]`."""
        module, is_embedding = part.module, self._sites.sites[site_id].kind == EMBEDDING
        if part.role is Role.A:
            a = _tensor(file, module.embedding_a or module.a)
            return a.T if is_embedding else a
        if part.role is Role.B:
            return _tensor(file, module.embedding_b or module.b).T
        if part.role is Role.LORA_BIAS:
            return _tensor(file, module.lora_bias).float()[None] * module.scale
        if part.role is Role.NORM:
            return _tensor(file, module.full).float()[None] + self._norm_offset
        if part.role is Role.BIAS:
            return self._bias_delta(part, site_id, file)[None]
        return self._gain(part, site_id, file)[None]

    def _bias_delta(self, part: Part, site_id: int, file: safe_open) -> Tensor:
        trained = _tensor(file, part.module.bias).float()
        base = self._biases[site_id]
        rows = slice(part.col_begin, part.col_begin + len(trained))
        return trained - base[rows].float().cpu()

    def _gain(self, part: Part, site_id: int, file: safe_open) -> Tensor:
        module, device = part.module, self._arena.data.device
        return dora_gain(
            self._linears[site_id],
            part.col_begin,
            _tensor(file, module.a).to(device),
            _tensor(file, module.b).to(device),
            module.scale,
            _tensor(file, module.magnitude).to(device),
        )

    def _view(self, place: TilePlace, blocks: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tile's bytes in the arena as `[rows, columns]`."""
        begin = blocks[place.block] * self._arena.block_bytes + place.offset_bytes
        shape = place.row_end - place.row_begin, place.col_end - place.col_begin
        flat = self._arena.flat(dtype)
        return flat[begin // dtype.itemsize :][: math.prod(shape)].view(shape)


def dora_gain(
    base: BaseLinear, out_begin: int, a: Tensor, b: Tensor, scale: float, magnitude: Tensor
) -> Tensor:
    """m / ||W + scale * B A|| by row, in row chunks; float32 `[out]`.

    Args:
        base: the site's weight; the module's rows begin at `out_begin`.
        a: `[rank, in]`. b: `[out, rank]`. magnitude: `[out]` or `[out, 1]`.

    Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", eq. 5.
    """
    a, b = a.float(), b.float()
    norms = []
    for begin in range(0, len(b), GAIN_CHUNK_ROWS):
        end = min(begin + GAIN_CHUNK_ROWS, len(b))
        weight = base.weight_rows(out_begin + begin, out_begin + end)
        norms.append(torch.linalg.vector_norm(weight + scale * (b[begin:end] @ a), dim=1))
    return magnitude.float().view(-1) / torch.cat(norms)


def _tensor(file: safe_open, info: TensorInfo | None) -> Tensor:
    tensor: Tensor = file.get_tensor(_known(info).name)
    return tensor


def _known(info: TensorInfo | None) -> TensorInfo:
    assert info is not None, "the plan asked for it"
    return info


def _scales(slices: Sequence[Slice], device: torch.device) -> Tensor:
    """float32 `[rank]`."""
    parts = [torch.full((part.rank_len,), part.scale) for part in slices]
    return torch.cat([torch.empty(0), *parts]).to(device)


def _shifted(place: TilePlace, part: Part, view: Tensor) -> Tile:
    """A tile in the coordinates of its site."""
    return Tile(
        part.row_begin + place.row_begin,
        part.row_begin + place.row_end,
        part.col_begin + place.col_begin,
        part.col_begin + place.col_end,
        view,
    )


def _merged(tiles: Sequence[Tile]) -> tuple[Tile, ...]:
    """Join tiles whose rows follow each other in the matrix and in memory into one view."""
    merged: list[Tile] = []
    for tile in tiles:
        if merged and _adjoin(merged[-1], tile):
            tile = _joined(merged.pop(), tile)
        merged.append(tile)
    return tuple(merged)


def _adjoin(first: Tile, second: Tile) -> bool:
    columns = (first.col_begin, first.col_end) == (second.col_begin, second.col_end)
    follows = first.data.data_ptr() + first.data.nbytes == second.data.data_ptr()
    return columns and first.row_end == second.row_begin and follows


def _joined(first: Tile, second: Tile) -> Tile:
    num_rows, width = second.row_end - first.row_begin, first.data.shape[1]
    data = first.data.as_strided((num_rows, width), (width, 1))
    return Tile(first.row_begin, second.row_end, first.col_begin, first.col_end, data)
