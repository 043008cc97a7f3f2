"""What a runner on a GPU has besides the model: device tables, workspace and captured graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.worker.adapters.landing import Landing
from services.worker.cuda_graphs import DecodeGraphs
from services.worker.decode_inputs import DecodeInputs
from services.worker.kernels.lora.device_tables import DeviceTables
from services.worker.kernels.lora.runs import RowRun
from services.worker.kernels.lora.side_stream import SideStream
from services.worker.kernels.lora.tables import DeltaTable
from services.worker.kernels.lora.triton import ALIGNED_ELEMENTS, DeviceLora, Planes
from services.worker.kernels.lora.worklist import LoraBatch
from services.worker.layers.operators import Operators
from services.worker.layers.triton_operators import TritonOperators
from services.worker.memory.buffer import KvBuffer
from services.worker.model.decoder import Decoder
from services.worker.model.sites import LINEAR, LM_HEAD, SiteTable
from services.worker.request import StepPlan
from services.worker.warm_up import warm_up

MIN_PLANE_ROWS = 4096
"""Rows of workspace at full width: 256 generations of 16 partial sums."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What sizes tables and workspaces."""

    max_resident: int
    max_lora_rank: int
    max_num_tokens: int


class GpuPath:
    """Keeps the device's tables equal to `table` and runs the steps that graphs can."""

    def __init__(
        self,
        model: Decoder,
        operators: Operators,
        kv: KvBuffer,
        table: DeltaTable,
        limits: GpuLimits,
        int8: bool = False,
    ) -> None:
        """Captures graphs when the device is a GPU, which takes a while.

        `int8`: adapters' matrices are integers.
        """
        assert isinstance(operators, TritonOperators), operators.name
        arena, sites = kv.arena, model.site_weights.table
        served = [site for site in sites.sites if site.kind in (LINEAR, LM_HEAD)]
        modules = Counter(place.site_id for place in sites.places.values())
        self._table = table
        self._model = model
        self._landings: dict[int, Landing] = {}
        """By slot: adapters whose bytes the step's stream has not waited for."""
        self._served = {site.id for site in served}
        self._heads = frozenset(site.id for site in served if site.kind == LM_HEAD)
        self._itemsize = kv.groups.itemsize
        tables = DeviceTables(
            arena.data.view(-1),
            [site.in_features for site in sites.sites],
            aligned_sites(sites),
            limits.max_resident,
            record_capacity(len(sites.places), limits.max_resident, arena.data.nbytes),
            int8,
        )
        max_ranks = limits.max_lora_rank * max(modules[site.id] for site in served)
        rows = max(MIN_PLANE_ROWS, limits.max_num_tokens)
        planes = Planes(rows, max_ranks, arena.data.device)
        side = SideStream(arena.data.device) if arena.data.is_cuda else None
        self.lora = DeviceLora(tables, planes, max(site.in_features for site in served), side)
        operators.lora = self.lora
        self._attention = operators.attention_kernels
        self._graphs: DecodeGraphs | None = None
        if arena.data.is_cuda:
            all_sites = site_masks(sites)[-1]
            warm_up(model, kv, self.lora, self._attention, all_sites, limits.max_num_tokens)
        if arena.data.is_cuda and model.config.moe is None:  # the host chooses experts: no graph
            inputs = self.decode_inputs(kv)
            self._graphs = DecodeGraphs(model, inputs, self.lora_batch(()), site_masks(sites))
            self._graphs.capture()

    def decode_inputs(self, kv: KvBuffer) -> DecodeInputs:
        """Static inputs for graphs of this runner."""
        max_model_len = self._model.config.max_position_embeddings
        ropes = self._model.ropes
        return DecodeInputs(
            kv, self.lora, ropes, max_model_len, self._itemsize, self._attention, self._heads
        )

    def enter(self, slot: int, landing: Landing | None = None) -> None:
        """Copy a slot of the table to the device; of the adapter's bytes, `landing` is to be waited
        for."""
        sites = range(self.lora.tables.num_sites)
        found = {site: self._table.get((slot, site)) for site in sites}
        deltas = {site: delta for site, delta in found.items() if delta is not None}
        in_torch = {
            site
            for site, delta in deltas.items()
            if site not in self._served or delta.replaces_rows
        }
        self.lora.tables.enter(slot, deltas, in_torch)
        if landing is not None:
            self._landings[slot] = landing

    def remove(self, slot: int) -> None:
        """Take a slot out of the device's tables; its blocks are free for steps to write."""
        self.lora.tables.remove(slot)
        if (landing := self._landings.pop(slot, None)) is not None:
            landing.wait_all()

    def fits_graph(self, plan: StepPlan, runs: Sequence[RowRun]) -> bool:
        """Whether a graph can compute the step."""
        return self._graphs is not None and self._graphs.fits(plan, runs)

    def replay(self, plan: StepPlan, runs: Sequence[RowRun], before: Tensor) -> Tensor:
        """Hidden states of a step that fits a graph; `before` = outputs of the step before."""
        assert self._graphs is not None, "no graph fits"
        for landing in self._landings_of(runs):
            landing.wait_all()
        return self._graphs.replay(plan, runs, before)

    def lora_batch(self, runs: tuple[RowRun, ...], num_rows: int | None = None) -> LoraBatch:
        """The adapters of a step; with `num_rows`, their work is on the device already."""
        if num_rows is None or not runs:
            return LoraBatch(runs, self._table, None, self.lora.tables)
        dense = self.lora.dense_runs(runs, num_rows)
        others = [run for run in runs if run not in dense]
        works = self.lora.begin(others, num_rows, self._itemsize)
        touched = self.lora.sites_of(runs)
        landings = tuple(self._landings_of(runs))
        return LoraBatch(runs, self._table, None, self.lora.tables, works, touched, dense, landings)

    def _landings_of(self, runs: Sequence[RowRun]) -> list[Landing]:
        """What a step of these runs has to wait for as it comes to each site. Adapters that do more
        than kernels can are waited for here, as a whole."""
        self._landings = {
            s: arriving for s, arriving in self._landings.items() if not arriving.is_over
        }
        found = []
        for slot in {run.slot for run in runs} & self._landings.keys():
            if self.lora.tables.in_torch(slot):
                self._landings[slot].wait_all()
            else:
                found.append(self._landings[slot])
        return found


def site_masks(sites: SiteTable) -> tuple[frozenset[int], ...]:
    """Sites that a graph's adapters may touch, smallest first: those of attention, then all. Most
    adapters are on attention alone, and even an empty launch takes microseconds."""
    attention = {p.site_id for name, p in sites.places.items() if "self_attn" in name}
    linear = {site.id for site in sites.sites if site.kind == LINEAR}
    return frozenset(attention & linear), frozenset(linear)


def aligned_sites(sites: SiteTable) -> list[bool]:
    """By site: whether all its widths are multiples of what kernels load at a time."""
    widths = {site.id: [site.in_features, site.out_features] for site in sites.sites}
    for place in sites.places.values():
        widths[place.site_id] += [place.out_begin, place.out_features]
    return [all(width % ALIGNED_ELEMENTS == 0 for width in widths[site.id]) for site in sites.sites]


def record_capacity(num_modules: int, max_resident: int, arena_bytes: int) -> int:
    """Records for as many adapters of rank <= 16 as slots or bytes allow, and for higher ranks."""
    return min(5 * max_resident * num_modules, arena_bytes // 4096) + arena_bytes // 65536 + 1024
