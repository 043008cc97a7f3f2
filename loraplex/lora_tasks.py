"""TensorRT-LLM's LoRA task ids: the first request carries the weights, later ones only the id.

async with RegistryClient() as registry, InferenceClient() as inference:
    tasks = LoraTasks(registry, inference, "llama-3-8b")
    await tasks.complete(LoraTask(7, weights, config), "Hello")
    await tasks.complete(LoraTask(7), "Hello again")
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.client.generation import Completion, CompletionChunk, Prompt
from loraplex.client.inference_client import DEFAULTS, InferenceClient, collect
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.errors import AdapterNotFound, InvalidRequest, NotFound
from loraplex.rewriting.trtllm import from_arrays

MAX_TASK_ID = (1 << 64) - 1
"""TensorRT-LLM's `lora_task_id` is an unsigned integer of 64 bits."""
TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class LoraTask:
    """The three inputs `lora_task_id`, `lora_weights` and `lora_config` of TensorRT-LLM."""

    task_id: int
    weights: Any = None
    """numpy array `[1, rows, width]`: float16, float32 or bfloat16 (`|V2`); None = sent before."""
    config: Any = None
    """numpy array of integers `[1, rows, 3]`: module id, layer, rank; None = sent before."""

    def __post_init__(self) -> None:
        if not 0 <= self.task_id <= MAX_TASK_ID:
            why = f"must be between 0 and {MAX_TASK_ID}"
            raise InvalidRequest.field("lora_task_id", self.task_id, why)
        if (self.weights is None) != (self.config is None):
            missing = "lora_weights" if self.weights is None else "lora_config"
            why = "must be sent together with the other one, or left out like it"
            raise InvalidRequest.field(missing, "", why)


@dataclass(frozen=True, slots=True)
class LoraTasks:
    """Requests that name adapters of one base by task id.

    The weights become an ephemeral adapter `task-ID` of the caller's tenant. It passes the checks
    of every upload, and all clients of the tenant can name it. Workers evict it like any other
    adapter, and fetch it again when a request names it.
    """

    registry: RegistryClient
    inference: InferenceClient
    base_id: str
    ttl_s: float = TTL_S
    """How long weights are kept after they were sent."""

    async def generate(
        self, task: LoraTask, prompt: Prompt, sampling: Any = DEFAULTS
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Stream the output of one prompt; see `InferenceClient.generate`.

        Raises:
            NotFound: the weights were never sent, or have expired (`LORA_TASK_NOT_CACHED`).
            InvalidAdapter: the weights do not fit the base; `violations` name the rows.
        """
        name = f"task-{task.task_id}"
        if task.weights is not None:
            await self._publish(name, task)
        try:
            async with aclosing(self.inference.generate(name, prompt, sampling)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except AdapterNotFound:
            raise NotFound(
                f"LoRA task {task.task_id} is not cached: send its weights and config again",
                reason="LORA_TASK_NOT_CACHED",
            ) from None

    async def complete(
        self, task: LoraTask, prompt: Prompt, sampling: Any = DEFAULTS
    ) -> Completion:
        """Collect the whole output of one prompt. Raises as `generate` does."""
        return collect([chunk async for chunk in self.generate(task, prompt, sampling)])

    async def _publish(self, name: str, task: LoraTask) -> None:
        geometry = await self.registry.admin.geometry(self.base_id)
        publication = Publication(name, base_id=self.base_id, keep_versions=1, ttl_s=self.ttl_s)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "adapter"
            arrays = task.weights, task.config
            await asyncio.to_thread(from_arrays, *arrays, out, geometry, self.base_id)
            await self.registry.upload(out, publication)
