"""The runner of one base on one device: builds the batch, runs the model, samples.

Plans come from the scheduler, and blocks and slots from the caches; the runner makes no such
decisions.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from loraplex.errors import LoraplexError
from loraplex_services.worker.adapters.device.copy_events import CopyEvents
from loraplex_services.worker.adapters.device.loader import AdapterLoader, CopiedImage
from loraplex_services.worker.adapters.pack.image import ImageBytes
from loraplex_services.worker.cache.kv_layout import TOKENS_PER_BLOCK
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.runner.parallel.messages import Drop, Enter, Unload
from loraplex_services.worker.runner.parallel.shared_head import LeadingHead, SharedHead
from loraplex_services.worker.runner.proposals import propose
from loraplex_services.worker.runner.step_batch import BatchMaker
from loraplex_services.worker.runner.step_inputs import StepInputs
from loraplex_services.worker.runner.step_results import (
    ForwardOutput,
    StepResults,
    TokenChooser,
    select_rows,
    take_outputs,
)
from loraplex_services.worker.runner.steps import PendingStep, StepOrder
from loraplex_services.worker.sampling.best_columns import BestRows
from loraplex_services.worker.types.extents import Extents
from loraplex_services.worker.types.runner_protocol import Copied, ModelInfo
from loraplex_services.worker.types.step_plan import StepPlan

if TYPE_CHECKING:  # Triton is not everywhere
    from loraplex_services.worker.runner.cuda_graphs import CapturedStep
    from loraplex_services.worker.runner.gpu_path import GpuPath
    from loraplex_services.worker.runner.parallel.followers import Followers


class TorchRunner:
    """Implements `runner_protocol.Runner`."""

    tokens_per_block = TOKENS_PER_BLOCK

    def __init__(
        self,
        model: Decoder,
        adapters: AdapterLoader,
        info: ModelInfo,
        batches: BatchMaker,
        operators: Operators,
        overlap: str,
    ) -> None:
        kv = batches.kv
        self.layout = adapters.layout
        self.arena = kv.arena
        self.arena_blocks = kv.arena.num_blocks
        self.block_bytes = kv.arena.block_bytes
        self.kv_group_windows = kv.windows
        self.state_blocks = kv.states.num_blocks if kv.states else 0
        self._model = model
        self._adapters = adapters
        self._info = info
        self._batches = batches
        self._chooser = TokenChooser(model, info.eos_token_ids, operators.draws)
        self._order = StepOrder(kv.arena.data.device.type, overlap)
        self._outputs = torch.zeros(0, dtype=torch.int64, device=kv.arena.data.device)
        """Tokens that the last step chose, on the device: see `step_results`."""
        self._ranks = operators.ranks
        self._followers: Followers | None = None
        self._shared_head = SharedHead(model, self._ranks, operators.draws)

    def lead(self, followers: Followers) -> None:
        """Let the other ranks, which are ready, follow this one from now on."""
        self._followers = followers
        self._chooser.shared = LeadingHead(self._shared_head, followers.send)

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self._followers is not None:
            self._followers.close()

    def model_info(self) -> ModelInfo:
        """Facts about the base."""
        return self._info

    def pack_adapter(self, path: Path) -> Future[int]:
        """Make the image of the adapter in a verified folder; the result is its pages."""
        return self._adapters.pack(path)

    def copy_adapter(
        self,
        path: Path,
        extents: Extents,
        step_s: float = 0.0,
        content: ImageBytes | None = None,
    ) -> Future[CopiedImage]:
        """Fill `extents` from the image in a folder: see `runner_protocol`. `content` is that of
        the image's file, if the folder is on another machine."""
        copied = self._adapters.copy(path, extents, step_s, content)
        if self._followers is None:
            return copied
        return self._followers.copy(path, extents, step_s, copied)

    def await_copies(self, timeout_s: float) -> None:
        """Wait until no copy is in progress, for at most `timeout_s`."""
        (self._followers or self._adapters).await_copies(timeout_s)

    def enter_adapter(self, slot: int, copied: Copied) -> None:
        """Let steps use what was copied under `slot`, which is not in use."""
        self._order.between(partial(self._enter, slot, cast(CopiedImage, copied)))

    @torch.inference_mode()
    def _enter(self, slot: int, copied: CopiedImage) -> None:
        try:
            if copied.failure is not None:
                raise copied.failure
            self._adapters.enter(slot, copied)
            self._entered(slot, copied.copy_events)
        except Exception:
            if copied.copy_events is not None:
                copied.copy_events.wait_all()  # steps may write to its blocks from now on
            if self._followers is not None:
                self._followers.send(Drop(copied.copy_id))
            raise
        if self._followers is not None:
            self._followers.send(Enter(slot, copied.copy_id))

    def _entered(self, slot: int, pending_copy: CopyEvents | None) -> None:
        if self._batches.records is not None:
            self._batches.records.address(slot)
        if self._batches.gpu is not None:
            self._enter_on_gpu(slot, self._batches.gpu, pending_copy)
        elif pending_copy is not None:
            pending_copy.wait_all()

    def _enter_on_gpu(self, slot: int, gpu: GpuPath, pending_copy: CopyEvents | None) -> None:
        try:
            gpu.enter(slot, pending_copy)
        except LoraplexError:
            self._adapters.unload(slot)
            raise

    def unload_adapter(self, slot: int) -> None:
        """Take `slot` out of the tables."""
        self._order.between(partial(self._unload, slot))

    def _unload(self, slot: int) -> None:
        if self._followers is not None:
            self._followers.send(Unload(slot))
        self._adapters.unload(slot)
        if self._batches.records is not None:
            self._batches.records.forget(slot)
        if self._batches.gpu is not None:
            self._batches.gpu.remove(slot)

    @property
    def stall_s(self) -> float:
        """Time in seconds that steps have waited for adapters that were being copied."""
        return self._adapters.stall_s

    @property
    def overlaps(self) -> bool:
        """Whether a step may be launched while the previous one runs."""
        return self._order.overlaps

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin one forward pass and sampling: see `runner_protocol` and `step_results`."""
        step, gpu = self._batches.read(plan), self._batches.gpu
        graph = None if gpu is None else gpu.graph_of(step)
        if gpu is not None and graph is not None:
            forward = partial(self._replay, step, gpu, graph)
        else:
            message = None if self._followers is None else self._followers.write(step)
            forward = partial(self._forward, step, self._batches.make(step), message)
        return self._order.launch(forward, partial(self._choose, step), not plan.awaits_masks)

    @torch.inference_mode()
    def _forward(
        self, step: StepInputs, batch: ForwardBatch, message: bytes | None
    ) -> ForwardOutput:
        take_outputs(batch.input_ids, step, self._outputs)
        if self._followers is not None and message is not None:
            self._followers.send_frame(message)
            self._share_tokens(step, batch)
        return ForwardOutput(self._model.forward(batch), batch.lora, batch)

    def _share_tokens(self, step: StepInputs, batch: ForwardBatch) -> None:
        """Tokens that the step before chose are on rank 0's device only."""
        if step.follows.shape[1]:
            self._ranks.broadcast(batch.input_ids)

    @torch.inference_mode()
    def follow(self, step: StepInputs) -> ForwardOutput:
        """Compute rank 0's step on this rank's part."""
        batch = self._batches.make(step)
        self._share_tokens(step, batch)
        return ForwardOutput(self._model.forward(batch), batch.lora, batch)

    @torch.inference_mode()
    def follow_logits(self, output: ForwardOutput, token_rows: Tensor) -> None:
        """Give this rank's logits of some rows of a step to rank 0."""
        self._model.add_to_logits(select_rows(output.hidden, output.lora, token_rows)[0])

    @torch.inference_mode()
    def follow_best(self, output: ForwardOutput, token_rows: Tensor, rows: BestRows) -> None:
        """Give this rank's best token for some rows of a step to rank 0."""
        hidden, _ = select_rows(output.hidden, output.lora, token_rows)
        self._shared_head.best(hidden, rows)

    @torch.inference_mode()
    def _replay(self, step: StepInputs, gpu: GpuPath, graph: CapturedStep) -> ForwardOutput:
        return ForwardOutput(gpu.replay(graph, step, self._outputs), gpu.lora_batch(step.runs))

    @torch.inference_mode()
    def _choose(self, step: StepInputs, output: ForwardOutput) -> StepResults:
        results = self._chooser.choose(step, output, self._outputs)
        self._outputs = results.outputs
        if self._model.draft_head is None or output.batch is None or not step.plan.uses_cache:
            return results
        chosen = results.outputs.tolist()
        proposals = propose(step.plan.rows, chosen, output.hidden, output.batch, self._model)
        return replace(results, proposals=proposals)
