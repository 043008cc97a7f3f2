"""Pure-decode steps as CUDA graphs: one launch on the host instead of hundreds.

A graph is captured for each batch size of a short list: for the base alone, for adapters on
attention, and for adapters anywhere. It reads its inputs at fixed addresses: `DecodeInputs` holds
them for the largest batch, and a step fills the first rows. Rows up to the batch size are padding
that writes nothing: no cache place, no keys, no adapter. Which adapters a step uses is read from
device tables, so one graph serves any mix. Steps that compute prompts are in `mixed_graphs`.
Everything else (several adapters in one request, embeddings or norms of an adapter's own) runs
eagerly, as does the head with sampling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.ops.lora.worklist import LoraBatch, PendingCopy
from loraplex_services.worker.runner.decode_inputs import BATCH_SIZES, DecodeInputs, batch_size_for
from loraplex_services.worker.runner.step_inputs import StepInputs

logger = logging.getLogger(__name__)

WARM_UP_RUNS = 2
"""Forward passes before a capture: kernels compile and libraries allocate in the first."""


class Graph(Protocol):
    """What is used of a `torch.cuda.CUDAGraph` once it is captured."""

    def replay(self) -> None:
        """Launch all that was captured."""
        ...


class CapturedStep(Protocol):
    """A step that is captured, in one graph or in several."""

    def replay(
        self, step: StepInputs, before: Tensor, pending_copies: Sequence[PendingCopy]
    ) -> Tensor:
        """Hidden states `[T, H]`. The next replay overwrites them.

        Args:
            before: outputs of the step before, read by rows that follow them.
            pending_copies: adapters of the step whose bytes are not all on the device yet.
        """
        ...


@dataclass(slots=True)
class GraphMemory:
    """What all captures share: graphs never run at once, so they use the same memory."""

    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A pure-decode step in one graph. Implements `CapturedStep`."""

    graph: Graph
    inputs: DecodeInputs
    batch: ForwardBatch
    """Kept for its workspaces, whose addresses the graph holds."""
    hidden: Tensor
    """`[size, H]`."""

    def replay(
        self, step: StepInputs, before: Tensor, pending_copies: Sequence[PendingCopy]
    ) -> Tensor:
        """See `CapturedStep`."""
        for pending_copy in pending_copies:
            pending_copy.wait_all()
        self.inputs.buffer.fill(step, step.runs)
        self.inputs.buffer.take_outputs(before)
        self.graph.replay()
        return self.hidden[: step.num_rows]


class DecodeGraphs:
    """The captured pure-decode steps of a runner."""

    def __init__(
        self,
        model: Decoder,
        inputs: DecodeInputs,
        table: LoraBatch,
        site_masks: Sequence[frozenset[int]],
    ) -> None:
        """
        Args:
            table: a batch without runs that names the adapters' tables.
            site_masks: sets of sites that adapters of a step touch, ascending; each gets graphs.
        """
        self._model = model
        self._inputs = inputs
        self._table = table
        self._masks = site_masks
        self._steps: dict[tuple[int, int], DecodeGraph] = {}

    def capture(self, memory: GraphMemory) -> None:
        """Capture every batch size, largest first, so that the others fit into its memory."""
        began_s = time.monotonic()
        for size in reversed(BATCH_SIZES):
            for mask, sites in enumerate(self._masks):
                self._steps[size, mask] = self._capture(size, sites, memory)
            logger.info("captured the decode graphs of %d rows", size)
        elapsed_s = time.monotonic() - began_s
        logger.info("captured %d decode graphs in %.1f s", len(self._steps), elapsed_s)

    def find(self, step: StepInputs, mask: int) -> DecodeGraph | None:
        """The graph of a step, unless it computes prompts or is too large.

        Args:
            mask: index of the sites that its adapters touch.
        """
        if not step.is_decode:
            return None
        size = batch_size_for(step.num_rows)
        return None if size is None else self._steps[size, mask]

    def _capture(self, size: int, sites: frozenset[int], memory: GraphMemory) -> DecodeGraph:
        """Capture with padding rows only: what was in the cache stays as it is."""
        self._inputs.buffer.clear()
        batch = self._inputs.batch(size, sites, self._table)
        # Warm up on the stream that captures: memory is cached by stream, and so are the
        # libraries' workspaces, which would else be captured anew for every graph.
        memory.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(memory.stream):
            for _ in range(WARM_UP_RUNS):
                forward_static(self._model, batch)
        torch.cuda.current_stream().wait_stream(memory.stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory.pool, stream=memory.stream):
            hidden = forward_static(self._model, batch)
        return DecodeGraph(graph, self._inputs, batch, hidden)


def forward_static(model: Decoder, batch: ForwardBatch) -> Tensor:
    """What a graph holds: list the adapters' groups, then the forward pass."""
    if batch.lora.work is not None:
        batch.lora.work.list_groups(len(batch.input_ids))
    return model.forward(batch)
