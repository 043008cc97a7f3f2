"""The parts of a runner that only GPUs need: device tables, workspace and captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loraplex_services.worker.adapters.device.copy_events import CopyEvents
from loraplex_services.worker.adapters.device.table import AdapterTable
from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.layers.triton_operators import TritonOperators
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.ops.lora.device_records import MAX_PARTS
from loraplex_services.worker.ops.lora.device_tables import (
    ALIGNED_ELEMENTS,
    DeviceTables,
    SiteShape,
)
from loraplex_services.worker.ops.lora.long_runs import fits_static_long_work, make_long_work
from loraplex_services.worker.ops.lora.runs import RowRun, cut_at_tiles, divided
from loraplex_services.worker.ops.lora.side_stream import SideStream
from loraplex_services.worker.ops.lora.site_parts import module_edges, site_parts
from loraplex_services.worker.ops.lora.step_work import fits_static_work
from loraplex_services.worker.ops.lora.triton import DeviceLora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.runner.block_tables import BlockTables
from loraplex_services.worker.runner.cuda_graphs import (
    CapturedStep,
    CapturedSteps,
    GraphMemory,
)
from loraplex_services.worker.runner.graph_inputs import (
    DECODE,
    GraphInputs,
    StepKind,
    mixed_kind,
)
from loraplex_services.worker.runner.input_buffer import InputBuffer
from loraplex_services.worker.runner.step_inputs import StepInputs
from loraplex_services.worker.runner.warm_up import IdleSteps
from loraplex_services.worker.types.runner_settings import RunnerSettings
from loraplex_services.worker.types.sites import LINEAR, LM_HEAD, SiteTable


class GpuPath:
    """Keeps the device's tables equal to `table` and runs the steps that graphs can."""

    def __init__(
        self,
        model: Decoder,
        operators: Operators,
        kv: KvBuffer,
        table: AdapterTable,
        settings: RunnerSettings,
        int8: bool,
    ) -> None:
        """Captures graphs when the device is a GPU, which takes a while. `int8`: the adapters'
        matrices are integers."""
        assert isinstance(operators, TritonOperators), operators.name
        arena, sites = kv.arena, model.site_weights.own_table
        self._table = table
        self._model = model
        self._kv = kv
        self._pending_copies: dict[int, CopyEvents] = {}
        """Copies of adapters, by slot, for which the step's stream has not waited."""
        self._heads = frozenset(site.id for site in sites.sites if site.kind == LM_HEAD)
        self._masks = (frozenset[int](), *site_masks(sites))
        self._masks_of_slots: dict[int, int | None] = {}
        """Index of the set of sites that a graph must have, by slot; None = no graph can compute
        it."""
        stored = torch.int8 if int8 else kv.dtype
        tables = DeviceTables(
            arena.data.view(-1),
            stored,
            site_shapes(sites, arena.block_bytes // stored.itemsize),
            settings.max_resident,
            record_capacity(len(sites.modules), settings.max_resident, arena.data.nbytes),
        )
        side = SideStream(arena.data.device) if arena.data.is_cuda else None
        self.lora = DeviceLora(tables, side)
        operators.lora = self.lora
        self._attention = operators.attention_maker
        self._block_tables = BlockTables(
            len(kv.windows),
            max(settings.max_num_seqs, DECODE.sizes[-1]),
            -(-model.config.max_position_embeddings // kv.tokens_per_block),
            kv.tokens_per_block,
            arena.data.device,
        )
        self.idle = IdleSteps(model, kv, self.lora, self._attention, self._masks[-1])
        self._graphs: list[CapturedSteps] = []
        if arena.data.is_cuda:
            self.idle.warm_up(settings.max_num_batched_tokens)
            # Graphs that contain collectives have not been tried.
            if operators.ranks.shard.size == 1 and self._attention.backend.captures_graphs:
                self.capture(settings.max_num_batched_tokens, GraphMemory())

    def capture(self, max_num_tokens: int, memory: GraphMemory) -> None:
        """Capture the graphs of all steps up to certain sizes. Recurrent layers look at where one
        sequence ends and the next begins, so that bases with them compute prompts eagerly."""
        table = self.lora_batch(())
        kinds = [DECODE]
        if self._kv.states is None and self._attention.backend.captures_contexts:
            kinds.append(mixed_kind(max_num_tokens))
        inputs = [self.graph_inputs(kind) for kind in kinds]
        self._graphs = [CapturedSteps(self._model, each, table, self._masks) for each in inputs]
        for graphs in reversed(self._graphs):  # the largest first
            graphs.capture(memory)

    def graph_inputs(self, kind: StepKind) -> GraphInputs:
        """Static inputs of steps of one kind."""
        return GraphInputs(kind, self._kv, self.lora, self._block_tables, self._attention)

    def holds(self, step: StepInputs) -> bool:
        """Whether the tables on the device have space for a step's sequences. Only those of an
        adapter with a rotary embedding of its own may be longer than the base's context."""
        return step.rope_rows is None or self._block_tables.hold(step.plan.rows)

    def eager_inputs(self, step: StepInputs) -> InputBuffer:
        """Inputs on the device of one step, which `holds`."""
        num_generations = step.num_rows - step.plan.num_contexts
        buffer = InputBuffer(step.num_token_rows, num_generations, 0, self._block_tables)
        buffer.fill(step)
        return buffer

    def enter(self, slot: int, pending_copy: CopyEvents | None = None) -> None:
        """Copy a slot of the table to the device. Steps wait for `pending_copy` before they read
        the adapter's bytes."""
        adapter = self._table.adapter(slot)
        self.lora.tables.enter_records(
            slot, adapter.records(), adapter.starts, adapter.in_torch, adapter.trains_norms
        )
        self._masks_of_slots[slot] = self.mask_of(slot)
        if pending_copy is not None:
            self._pending_copies[slot] = pending_copy

    def mask_of(self, slot: int) -> int | None:
        """Index of the smallest set of sites whose graphs compute the adapter; None = none do.

        No graph contains the head, so it does not matter what the adapter changes there.
        """
        entered = self.lora.tables.entered(slot)
        if not entered.in_torch <= self._heads:
            return None
        touched = entered.sites - self._heads
        return next(mask for mask, sites in enumerate(self._masks) if touched <= sites)

    def remove(self, slot: int) -> None:
        """Remove a slot from the device's tables. Steps may then write to its blocks."""
        self.lora.tables.remove(slot)
        del self._masks_of_slots[slot]
        if (pending_copy := self._pending_copies.pop(slot, None)) is not None:
            pending_copy.wait_all()

    def graph_of(self, step: StepInputs) -> CapturedStep | None:
        """The captured step that computes `step`; None if it must run eagerly."""
        if not self._graphs or not step.num_rows or not step.plan.uses_cache:
            return None
        if step.plan.notes_experts or not self.holds(step):
            return None
        masks = [self._masks_of_slots[run.slot] for run in step.runs]
        known = [mask for mask in masks if mask is not None]
        if len(known) < len(masks):
            return None
        tables, (short, long) = self.lora.tables, divided(step.runs)
        # Graphs of steps that only decode have no long runs.
        in_tiles = cut_at_tiles(step.runs if step.is_decode else short)
        if not fits_static_work(tables, in_tiles) or not fits_static_long_work(tables, long):
            return None
        mask = max(known, default=0)
        found = (graphs.find(step, mask) for graphs in self._graphs)
        return next((graph for graph in found if graph is not None), None)

    def replay(self, graph: CapturedStep, step: StepInputs, before: Tensor) -> Tensor:
        """Hidden states of a step; `before` = outputs of the step before."""
        return graph.replay(step, before, self._pending_copies_of(step.runs))

    def lora_batch(
        self, runs: tuple[RowRun, ...], num_rows: int | None = None, is_decode: bool = False
    ) -> LoraBatch:
        """The adapters of a step; without `num_rows`, for its head alone. As in graphs, steps that
        only decode have no long runs."""
        pending_copies = tuple(self._pending_copies_of(runs))
        lora = LoraBatch(runs, self._table, tables=self.lora.tables, pending_copies=pending_copies)
        if num_rows is None or not runs:
            return lora
        short, long = (runs, ()) if is_decode else divided(runs)
        return replace(
            lora,
            sites=self.lora.sites_of(runs),
            work=self.lora.begin(short, num_rows) if short else None,
            long=make_long_work(self.lora.tables, long) if long else None,
        )

    def _pending_copies_of(self, runs: Sequence[RowRun]) -> list[CopyEvents]:
        """The copies that a step of these runs has to wait for as it comes to each site. Adapters
        that do more than kernels can are waited for here, as a whole."""
        if not self._pending_copies:
            return []
        self._pending_copies = {
            s: copy for s, copy in self._pending_copies.items() if not copy.is_done
        }
        found = []
        for slot in {run.slot for run in runs} & self._pending_copies.keys():
            if self.lora.tables.entered(slot).in_torch:
                self._pending_copies[slot].wait_all()
            else:
                found.append(self._pending_copies[slot])
        return found


def site_masks(sites: SiteTable) -> tuple[frozenset[int], ...]:
    """Sites that a graph's adapters may touch, smallest first: those of attention, then all. Most
    adapters are on attention alone, and even an empty launch takes microseconds."""
    mixers = ("self_attn", "linear_attn")
    attention = {
        p.site_id for name, p in sites.modules.items() if any(part in name for part in mixers)
    }
    linear = {site.id for site in sites.sites if site.kind == LINEAR}
    return frozenset(attention & linear), frozenset(linear)


def site_shapes(sites: SiteTable, block_elements: int) -> list[SiteShape]:
    """The shapes of all sites, for launches; those that kernels do not serve have no parts.

    Args:
        block_elements: numbers of an adapter that a block of the arena holds.
    """
    shapes = []
    for site, edges, parts in zip(sites.sites, module_edges(sites), site_parts(sites), strict=True):
        num_modules = len(edges) - 1
        ends = edges if num_modules <= MAX_PARTS else [0, site.out_features]
        widths = [site.in_features, *ends]
        shapes.append(
            SiteShape(
                site.in_features,
                parts,
                is_aligned=all(width % ALIGNED_ELEMENTS == 0 for width in widths),
                may_be_cut=max(widths) > block_elements or num_modules > MAX_PARTS,
            )
        )
    return shapes


def record_capacity(num_modules: int, max_resident: int, arena_bytes: int) -> int:
    """Number of records for as many adapters of rank <= 16 as slots or bytes allow, and for higher
    ranks."""
    return min(5 * max_resident * num_modules, arena_bytes // 4096) + arena_bytes // 65536 + 1024
