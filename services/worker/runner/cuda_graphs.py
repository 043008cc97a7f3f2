"""Steps as CUDA graphs: one launch on the host instead of hundreds.

A graph is captured for each size of a short list: for the base alone, for adapters on attention,
and for adapters anywhere. It reads its inputs at fixed addresses: `GraphInputs` holds them for the
largest step, and a step fills the first rows. Rows up to the graph's size are padding that writes
nothing: no KV slot, no keys, no adapter. Which adapters a step uses is read from device tables, so
one graph serves any mix. Everything else (adapters of which torch computes a part, more runs than
the lists hold) runs eagerly, as does the head with sampling.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.ops.lora.worklist import LoraBatch, PendingCopy
from loraplex_services.worker.runner.graph_inputs import GraphInputs
from loraplex_services.worker.runner.step_inputs import StepInputs

logger = logging.getLogger(__name__)

WARM_UP_RUNS = 2
"""Number of forward passes before a capture: the first compiles kernels, and libraries allocate
memory."""


@dataclass(slots=True)
class GraphMemory:
    """The memory of all captures. Graphs never run at the same time, so they share it."""

    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Launch on the capturing stream, in order with everything else there."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step of one size and set of sites."""

    graph: torch.cuda.CUDAGraph
    inputs: GraphInputs
    batch: ForwardBatch
    """Its workspaces are kept, because their addresses are in the graph."""
    hidden: Tensor
    """`[size, H]`."""

    def replay(
        self, step: StepInputs, before: Tensor, pending_copies: Sequence[PendingCopy]
    ) -> Tensor:
        """Hidden states `[T, H]`. The next replay overwrites them.

        Args:
            before: outputs of the step before, read by rows that follow them.
            pending_copies: adapters of the step whose bytes are not all on the device yet.
        """
        for pending_copy in pending_copies:
            pending_copy.wait_all()
        self.inputs.fill(step, self.batch)
        self.inputs.buffer.take_outputs(before)
        self.graph.replay()
        return self.hidden[: step.num_token_rows]


class CapturedSteps:
    """The captured steps of one kind, by size and by the sites that adapters touch."""

    def __init__(
        self,
        model: Decoder,
        inputs: GraphInputs,
        table: LoraBatch,
        site_masks: Sequence[frozenset[int]],
    ) -> None:
        """
        Args:
            table: a batch without runs that names the adapters' tables.
            site_masks: sets of sites that adapters of a step touch, ascending.
        """
        self.inputs = inputs
        self._model = model
        self._table = table
        self._masks = site_masks
        self._steps: dict[tuple[int, int], CapturedStep] = {}

    def capture(self, memory: GraphMemory) -> None:
        """Capture every size, largest first, so that the others fit into its memory."""
        kind, began_s = self.inputs.kind, time.monotonic()
        for size in reversed(kind.sizes):
            gc.collect()
            gc.disable()  # what is collected during a capture might free memory of the device
            try:
                for mask, sites in enumerate(self._masks):
                    self._steps[size, mask] = self.capture_step(size, sites, memory)
            finally:
                gc.enable()
            logger.info("captured the %s steps of %d rows", kind.name, size)
        elapsed_s = time.monotonic() - began_s
        num_graphs = len(self._steps)
        logger.info("captured %d graphs of %s steps in %.1f s", num_graphs, kind.name, elapsed_s)

    def capture_step(self, size: int, sites: frozenset[int], memory: GraphMemory) -> CapturedStep:
        """Capture with padding rows only, so that the cache keeps its content."""
        self.inputs.clear()
        batch = self.inputs.batch(size, sites, self._table)
        # Warm up on the stream that captures: memory is cached by stream, and so are the
        # libraries' workspaces, which would otherwise be captured again for every graph.
        with memory.on_stream():
            for _ in range(WARM_UP_RUNS):
                forward_static(self._model, batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory.pool, stream=memory.stream):
            hidden = forward_static(self._model, batch)
        return CapturedStep(graph, self.inputs, batch, hidden)

    def find(self, step: StepInputs, mask: int) -> CapturedStep | None:
        """The captured step that computes `step`, unless it is too large or of another kind.

        Args:
            mask: index of the sites that its adapters touch.
        """
        size = self.inputs.size_for(step)
        return None if size is None else self._steps[size, mask]


def forward_static(model: Decoder, batch: ForwardBatch) -> Tensor:
    """The content of a graph: list the adapters' groups, then run the forward pass."""
    if batch.lora.work is not None:
        batch.lora.work.list_groups(len(batch.input_ids))
    return model.forward(batch)
