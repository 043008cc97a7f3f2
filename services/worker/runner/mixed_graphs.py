"""Steps with prompts as CUDA graphs, with attention running eagerly between them.

A mixed step has as many shapes as there are mixes of prompts and single tokens, but only attention
looks at where one sequence ends and the next begins. Everything else sees token rows. So a forward
pass over a fixed number of token rows is captured in one graph more than it has layers, each from
one layer's attention to the next one's. A step of up to that many token rows fills the first ones,
and replays the segments with its own attention in between: about 5 launches a layer instead of 20.
(On an H200, an eager step of 256 prompt tokens and 64 decoding rows took 16.7 ms with the base
alone and 78 ms with 33 adapters, nearly all of it launches.)

There is a set of segments for each size in `MIXED_SIZES` and each set of sites that adapters touch:
with three sets of sites and 32 layers, 8 * 3 * 33 = 792 graphs. All share one memory pool, whose
size is that of the largest forward pass plus the hidden states of each set of segments. A step of
more token rows takes the device longer than its launches take the host, and runs eagerly.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.ops.attention.backend import AttentionBackend, AttentionMaker
from loraplex_services.worker.ops.attention.interruptible import InterruptingMetadata
from loraplex_services.worker.ops.attention.metadata import (
    AttentionMetadata,
    CosSin,
    KvCacheParams,
)
from loraplex_services.worker.ops.lora.step_work import MIN_RUNS, static_work
from loraplex_services.worker.ops.lora.triton import DeviceLora
from loraplex_services.worker.ops.lora.worklist import LoraBatch, PendingCopy
from loraplex_services.worker.runner.block_tables import BlockTables
from loraplex_services.worker.runner.cuda_graphs import GraphMemory, forward_static
from loraplex_services.worker.runner.input_buffer import InputBuffer
from loraplex_services.worker.runner.step_inputs import StepInputs

MIXED_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Token rows of captured steps. Padding costs nothing up to about 200 rows, which take as long as
reading the weights does; above that up to a third of the step, half of that on average."""


class MixedInputs:
    """Static inputs of steps that compute prompts, and the tensors between segments."""

    def __init__(
        self,
        kv: KvBuffer,
        lora: DeviceLora,
        tables: BlockTables,
        max_num_tokens: int,
        attention: AttentionMaker,
    ) -> None:
        """
        Args:
            max_num_tokens: the most token rows of any step: no larger size is captured.
        """
        self.kv = kv
        self._attention = attention
        self._max_num_tokens = max_num_tokens
        self.sizes = tuple(size for size in MIXED_SIZES if size <= max_num_tokens)
        num_tokens = max(self.sizes, default=1)
        self.buffer = InputBuffer(num_tokens, tables.device.shape[1], MIN_RUNS, tables)
        self._work = static_work(lora.tables, num_tokens, self.buffer.runs)
        self._qkv: dict[int, Tensor] = {}
        self._attended: dict[int, Tensor] = {}
        """By width: layers run one after another, and all sizes are parts of the largest."""

    def batch(
        self,
        size: int,
        sites: frozenset[int],
        table: LoraBatch,
        attention: InterruptingMetadata,
        pending_copy: PendingCopy,
    ) -> ForwardBatch:
        """The batch that the segments of `size` token rows read.

        Args:
            sites: where adapters may add something; none = the base alone.
            table: names the adapters' tables.
            pending_copy: is asked to wait for each of these sites.
        """
        work = self._work if sites else None
        buffer = self.buffer
        return ForwardBatch(
            input_ids=buffer.input_ids[:size],
            positions=buffer.positions[:size],
            attention=attention,
            lora=replace(table, runs=(), work=work, sites=sites, pending_copies=(pending_copy,)),
            rope_rows=buffer.rope_rows[:size],
        )

    def qkv(self, size: int, widths: Sequence[int], like: Tensor) -> Tensor:
        """`[size, sum of widths]`: queries, keys and values side by side."""
        return self._rows(self._qkv, size, sum(widths), like)

    def attended(self, size: int, width: int, like: Tensor) -> Tensor:
        """`[size, width]`: what attention returns. Rows of padding keep what they held before,
        which is finite."""
        return self._rows(self._attended, size, width, like)

    def _rows(self, known: dict[int, Tensor], size: int, width: int, like: Tensor) -> Tensor:
        if width not in known:
            known[width] = like.new_zeros(len(self.buffer.input_ids), width)
        return known[width][:size]

    def metadata(self, step: StepInputs, rotations: Sequence[CosSin]) -> AttentionMetadata:
        """The attention metadata of a step with which the buffer has been filled.

        Args:
            rotations: by layer, of the step's token rows.
        """
        num_contexts, num_tokens = step.plan.num_contexts, step.num_token_rows
        metadata = self._attention.metadata(
            num_contexts=num_contexts,
            num_generations=step.num_rows - num_contexts,
            num_tokens=num_tokens,
            num_ctx_tokens=step.plan.num_context_tokens,
            seq_lens=torch.from_numpy(step.num_tokens),
            rows=step.plan.rows,
            kv_cache_params=KvCacheParams(
                use_cache=True, num_cached_tokens_per_seq=tuple(step.starts.tolist())
            ),
            kv_cache_manager=self.kv,
            position_ids=self.buffer.positions[:num_tokens],
            max_num_requests=len(self.buffer.block_tables.device[0]),
            max_num_tokens=self._max_num_tokens,
            device_inputs=self.buffer.device_inputs(step),
        )
        metadata.rotations = rotations
        metadata.prepare()
        metadata.begin_forward()
        return metadata


def first_rows(rotations: Sequence[CosSin], num_tokens: int) -> list[CosSin]:
    """Cosines and sines of the first token rows, by layer. Layers share a few tensors, each of
    which is cut once."""
    cut: dict[int, CosSin] = {}
    for rotation in rotations:
        if id(rotation) not in cut:
            cos, sin = rotation
            cut[id(rotation)] = cos[:num_tokens], sin[:num_tokens]
    return [cut[id(rotation)] for rotation in rotations]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer, which follows a segment."""

    backend: AttentionBackend
    qkv: Tensor
    """`[size, widths of q, k and v]`, which the segment has written."""
    attended: Tensor
    """`[size, num_heads * head_dim]`, which the next segment reads."""

    def run(self, metadata: AttentionMetadata) -> None:
        """Attend, for as many token rows as the step has."""
        metadata.out = self.attended[: metadata.num_tokens]
        self.backend.forward(self.qkv[: metadata.num_tokens], None, None, metadata)


@dataclass(slots=True)
class GraphSegment:
    """A part of the forward pass without attention, and the attention after it."""

    graph: torch.cuda.CUDAGraph | None = None
    """None until the segment is captured."""
    sites: list[int] = field(default_factory=list)
    """Sites at which the segment reads adapters, in order."""
    attention: LayerAttention | None = None
    """None after the last layer."""


@dataclass(frozen=True, slots=True)
class MixedGraph:
    """The segments of one size and set of sites. Implements `cuda_graphs.CapturedStep`."""

    inputs: MixedInputs
    segments: Sequence[GraphSegment]
    batch: ForwardBatch
    """Kept for its workspaces, whose addresses the graphs hold."""
    hidden: Tensor
    """`[size, H]`."""

    @property
    def num_graphs(self) -> int:
        """Number of graphs: one for each segment."""
        return len(self.segments)

    def replay(
        self, step: StepInputs, before: Tensor, pending_copies: Sequence[PendingCopy]
    ) -> Tensor:
        """See `CapturedStep`. Waits for an adapter's bytes segment by segment."""
        buffer, num_tokens = self.inputs.buffer, step.num_token_rows
        buffer.fill(step, step.runs)
        buffer.take_outputs(before)
        rotations = first_rows(self.batch.attention.rotations, num_tokens)
        metadata = self.inputs.metadata(step, rotations)
        for segment in self.segments:
            for pending_copy in pending_copies:
                for site_id in segment.sites:
                    pending_copy.wait(site_id)
            assert segment.graph is not None, "captured"
            segment.graph.replay()
            if segment.attention is not None:
                segment.attention.run(metadata)
        return self.hidden[:num_tokens]


class SegmentRecorder:
    """Cuts a forward pass into segments. Implements `PendingCopy`, to note which sites are read."""

    def __init__(self, inputs: MixedInputs, size: int) -> None:
        self._inputs = inputs
        self.size = size
        self.segments = [GraphSegment()]

    def wait(self, site_id: int) -> None:
        """Note that the segment reads adapters at a site."""
        if site_id not in self.segments[-1].sites:
            self.segments[-1].sites.append(site_id)

    def wait_all(self) -> None:
        """Not supported: each site is waited for separately."""
        raise AssertionError("a captured pass waits site by site")

    def metadata(self) -> InterruptingMetadata:
        """Attention metadata that interrupts the forward pass before each layer's attention."""
        return InterruptingMetadata(
            num_contexts=0,
            num_generations=0,
            num_tokens=self.size,
            num_ctx_tokens=0,
            seq_lens=torch.zeros(0, dtype=torch.int64),
            kv_cache_params=KvCacheParams(use_cache=True),
            interrupt=self.interrupt,
        )

    def interrupt(self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """End the segment with its queries, keys and values, and begin the next."""
        widths = q.shape[1], k.shape[1], v.shape[1]
        qkv = self._inputs.qkv(self.size, widths, q)
        torch.cat((q, k, v), dim=1, out=qkv)
        self.end_segment()
        attended = self._inputs.attended(self.size, widths[0], q)
        self.segments[-1].attention = LayerAttention(backend, qkv, attended)
        self.segments.append(GraphSegment())
        self.begin_segment()
        return attended

    def begin_segment(self) -> None:
        """Called before anything of a segment is launched."""

    def end_segment(self) -> None:
        """Called when all of a segment is launched."""


class CapturingRecorder(SegmentRecorder):
    """Captures a graph of each segment, in the current stream."""

    def __init__(self, inputs: MixedInputs, size: int, memory: GraphMemory) -> None:
        super().__init__(inputs, size)
        self._pool = memory.pool

    def begin_segment(self) -> None:
        """Begin its capture."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def end_segment(self) -> None:
        """End its capture."""
        self._graph.capture_end()
        self.segments[-1].graph = self._graph


@dataclass(frozen=True, slots=True)
class MixedGraphs:
    """Steps of a runner that compute prompts. Implements `cuda_graphs.Capturable`."""

    model: Decoder
    inputs: MixedInputs
    table: LoraBatch
    """A batch without runs that names the adapters' tables."""

    @property
    def sizes(self) -> Sequence[int]:
        """See `Capturable`; in token rows."""
        return self.inputs.sizes

    def size_for(self, step: StepInputs) -> int | None:
        """See `Capturable`."""
        return next((size for size in self.sizes if size >= step.num_token_rows), None)

    def capture(self, size: int, sites: frozenset[int], memory: GraphMemory) -> MixedGraph:
        """Capture with padding rows only."""
        self.inputs.buffer.clear()
        with memory.on_stream():
            self.record(SegmentRecorder(self.inputs, size), sites)  # compiles and allocates
            torch.cuda.synchronize()
            gc.collect()
            gc.disable()  # what is collected during a capture might free memory of the device
            try:
                return self.record(CapturingRecorder(self.inputs, size, memory), sites)
            finally:
                gc.enable()

    def record(self, recorder: SegmentRecorder, sites: frozenset[int]) -> MixedGraph:
        """Run one forward pass that `recorder` cuts into segments."""
        inputs, size = self.inputs, recorder.size
        batch = inputs.batch(size, sites, self.table, recorder.metadata(), recorder)
        recorder.begin_segment()
        hidden = forward_static(self.model, batch)
        recorder.end_segment()
        return MixedGraph(inputs, recorder.segments, batch, hidden)
