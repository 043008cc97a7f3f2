"""Pure-decode steps as CUDA graphs: one launch on the host instead of hundreds.

A graph is captured for each batch size of a short list: for the base alone, for adapters on
attention, and for adapters anywhere. It reads its inputs at fixed addresses: `DecodeInputs` holds
them for the largest batch, and a step fills the first rows. Rows up to the batch size are padding
that writes nothing: no cache place, no keys, no adapter. Which adapters a step uses is read from
device tables, so one graph serves any mix. Everything else (contexts, several adapters in one
request, embeddings or norms of an adapter's own) runs eagerly, as does the head with sampling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.decode_inputs import BATCH_SIZES, DecodeInputs, batch_size_for
from services.worker.kernels.lora.runs import RowRun
from services.worker.kernels.lora.worklist import LoraBatch
from services.worker.model.batch import ForwardBatch
from services.worker.model.decoder import Decoder
from services.worker.request import StepPlan
from services.worker.step_results import take_outputs

logger = logging.getLogger(__name__)

WARM_UP_RUNS = 2
"""Forward passes before a capture: kernels compile and libraries allocate in the first."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph, what it reads and where it leaves its result."""

    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    """Kept for its workspaces, whose addresses the graph holds."""
    hidden: Tensor
    """`[size, H]`; the next replay overwrites it."""


class DecodeGraphs:
    """The captured steps of a runner."""

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
        self._masks = (frozenset[int](), *site_masks)
        self._steps: dict[tuple[int, frozenset[int]], CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self) -> None:
        """Capture every batch size, largest first, so that the others fit into its memory."""
        began_s = time.monotonic()
        kinds = [(size, sites) for size in reversed(BATCH_SIZES) for sites in self._masks]
        for i, (size, sites) in enumerate(kinds):
            self._steps[size, sites] = self._capture(size, sites)
            logger.info("captured graph %d of %d: %d rows", i + 1, len(kinds), size)
        logger.info("captured all graphs in %.1f s", time.monotonic() - began_s)

    def fits(self, plan: StepPlan, runs: Sequence[RowRun]) -> bool:
        """Whether a graph can compute the step, which must run eagerly otherwise."""
        return self._inputs.accepts(plan, runs)

    def replay(self, plan: StepPlan, runs: Sequence[RowRun], before: Tensor) -> Tensor:
        """Hidden states `[rows, H]` of a step that fits. The next call overwrites them.

        Args:
            before: outputs of the step before, read by rows that follow them.
        """
        size = batch_size_for(len(plan.rows))
        assert size is not None, len(plan.rows)
        touched = self._inputs.touched_sites(runs)
        step = self._steps[size, next(sites for sites in self._masks if touched <= sites)]
        self._inputs.fill(plan, runs, size)
        take_outputs(self._inputs.input_ids, plan, before)
        step.graph.replay()
        return step.hidden[: len(plan.rows)]

    def _capture(self, size: int, sites: frozenset[int]) -> CapturedStep:
        """Capture with padding rows only: what was in the cache stays as it is."""
        self._inputs.fill(StepPlan(0, ()), (), size)
        if sites:
            self._inputs.work(size).fill(())
        batch = self._inputs.batch(size, sites, self._table)
        # Warm up on the stream that captures: memory is cached by stream, and so are the
        # libraries' workspaces, which would else be captured anew for every graph.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                self._forward(batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            hidden = self._forward(batch)
        return CapturedStep(graph, batch, hidden)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return forward_static(self._model, batch)


def forward_static(model: Decoder, batch: ForwardBatch) -> Tensor:
    """What a graph holds: count the adapters' work, then the forward pass."""
    for work in batch.lora.works or ():
        work.count()
    return model.forward(batch)
