"""Decode steps as CUDA graphs: one launch on the host instead of hundreds.

A graph is captured for each batch size of a short list: for the base alone, for adapters on
attention, and for adapters anywhere. It reads its inputs at fixed addresses: `DecodeInputs` holds
them for the largest batch, and a step fills the first rows. Rows up to the batch size are padding
that writes nothing: no KV slot, no keys, no adapter. Which adapters a step uses is read from
device tables, so one graph serves any mix. Steps that compute prompts are in `mixed_graphs`.
Everything else (several adapters in one request, embeddings or norms of an adapter's own) runs
eagerly, as does the head with sampling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
"""Number of forward passes before a capture: the first compiles kernels, and libraries allocate
memory."""


class CapturedStep(Protocol):
    """A captured step, in one graph or in several."""

    @property
    def num_graphs(self) -> int: ...

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


class Capturable(Protocol):
    """One kind of step: its sizes, and how it is captured."""

    @property
    def sizes(self) -> Sequence[int]:
        """Rows of captured steps, ascending."""
        ...

    def size_for(self, step: StepInputs) -> int | None:
        """The smallest size that holds a step; None if there is none."""
        ...

    def capture(self, size: int, sites: frozenset[int], memory: GraphMemory) -> CapturedStep:
        """Capture a step of `size` rows whose adapters touch `sites`."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A pure-decode step in one graph. Implements `CapturedStep`."""

    graph: torch.cuda.CUDAGraph
    inputs: DecodeInputs
    batch: ForwardBatch
    """Kept for its workspaces, whose addresses are in the graph."""
    hidden: Tensor
    """`[size, H]`."""
    num_graphs: int = 1

    def replay(
        self, step: StepInputs, before: Tensor, pending_copies: Sequence[PendingCopy]
    ) -> Tensor:
        """See `CapturedStep`."""
        for pending_copy in pending_copies:
            pending_copy.wait_all()
        self.inputs.fill(step)
        self.inputs.buffer.take_outputs(before)
        self.graph.replay()
        return self.hidden[: step.num_rows]


@dataclass(frozen=True, slots=True)
class DecodeGraphs:
    """Pure-decode steps of a runner. Implements `Capturable`."""

    model: Decoder
    inputs: DecodeInputs
    table: LoraBatch
    """A batch without runs that names the adapters' tables."""
    sizes: tuple[int, ...] = BATCH_SIZES

    def size_for(self, step: StepInputs) -> int | None:
        """None if the step computes prompts as well."""
        return batch_size_for(step.num_rows) if step.is_decode else None

    def capture(self, size: int, sites: frozenset[int], memory: GraphMemory) -> DecodeGraph:
        """Capture with padding rows only, so that the cache keeps its content."""
        self.inputs.clear()
        batch = self.inputs.batch(size, sites, self.table)
        # Warm up on the stream that captures: memory is cached by stream, and so are the
        # libraries' workspaces, which would else be captured again for every graph.
        with memory.on_stream():
            for _ in range(WARM_UP_RUNS):
                forward_static(self.model, batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory.pool, stream=memory.stream):
            hidden = forward_static(self.model, batch)
        return DecodeGraph(graph, self.inputs, batch, hidden)


class CapturedSteps:
    """The captured steps of one kind, by size and by the sites that adapters touch."""

    def __init__(self, kind: Capturable, site_masks: Sequence[frozenset[int]]) -> None:
        """`site_masks`: sets of sites that adapters of a step touch, ascending."""
        self._kind = kind
        self._masks = site_masks
        self._steps: dict[tuple[int, int], CapturedStep] = {}

    def capture(self, memory: GraphMemory) -> None:
        """Capture every size, largest first, so that the others fit into its memory."""
        kind, began_s = type(self._kind).__name__, time.monotonic()
        for size in reversed(self._kind.sizes):
            for mask, sites in enumerate(self._masks):
                self._steps[size, mask] = self._kind.capture(size, sites, memory)
            logger.info("%s: captured the steps of %d rows", kind, size)
        num_graphs = sum(step.num_graphs for step in self._steps.values())
        elapsed_s = time.monotonic() - began_s
        logger.info("%s: captured %d graphs in %.1f s", kind, num_graphs, elapsed_s)

    def find(self, step: StepInputs, mask: int) -> CapturedStep | None:
        """The captured step that computes `step`, unless it is too large or of another kind.

        Args:
            mask: index of the sites that its adapters touch.
        """
        size = self._kind.size_for(step)
        return None if size is None else self._steps[size, mask]


def forward_static(model: Decoder, batch: ForwardBatch) -> Tensor:
    """What a graph contains: list the adapters' groups, then run the forward pass."""
    if batch.lora.work is not None:
        batch.lora.work.list_groups(len(batch.input_ids))
    return model.forward(batch)
