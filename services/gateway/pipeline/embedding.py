"""Computes vectors of prompts with a base or an adapter."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from loraplex.api.output import ServedBy, Usage
from loraplex.api.sampling import Sampling
from loraplex.errors import InvalidRequest, LoraplexError
from loraplex_services.gateway.pipeline.collected_bytes import Note
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.pooling import normalizes
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import GenerateCall

NO_OUTPUT = Sampling(max_tokens=0, echo=True)
"""Sampling of calls that end with one vector. Only a request with echo may generate no tokens; the
echo itself is not used."""
_MAX_VALUES_AT_ONCE = 16_384
"""Numbers of vectors that are formatted at a time by the event loop."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a pooled vector is post-processed."""

    normalize: bool | None = None
    """Whether vectors are scaled to length 1; None = as the adapter specifies, else they are."""
    dimensions: int = 0
    """Number of leading values that are kept, before normalising; 0 = all."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """The results of calls for vectors, in their order."""

    prepared: list[PreparedRequest]
    vectors: Sequence[Sequence[float]]
    """Arrays of numbers: an object for each number would take four times the memory."""
    worker_id: str
    """Worker of the first vector."""

    @property
    def is_large(self) -> bool:
        """Whether to format them would stop the event loop for more than 2 ms."""
        return sum(map(len, self.vectors)) > _MAX_VALUES_AT_ONCE

    @property
    def usage(self) -> Usage:
        """Prompt tokens over all calls."""
        return Usage(prompt_tokens=sum(len(each.prompt_ids) for each in self.prepared))

    @property
    def served_by(self) -> ServedBy:
        """The adapters and base that ran, with the worker of the first call."""
        return self.prepared[0].served_by(self.worker_id)


async def embed_all(
    generation: Generation, calls: Sequence[GenerateCall], finish: Finish, note: Note
) -> Pooled:
    """Finished vectors in the order of the calls, one after another as in `prepare_all`. The first
    error ends all of them.

    Raises: InvalidRequest for more dimensions than there are; what `pool_all` raises.
    """
    pooled = await pool_all(generation, calls, note)
    vectors = []
    for prepared, vector in zip(pooled.prepared, pooled.vectors, strict=True):
        vectors.append(finished(vector, finish, is_unit=normalizes(prepared.target.adapters)))
        await asyncio.sleep(0)
    return Pooled(pooled.prepared, vectors, pooled.worker_id)


async def pool_all(generation: Generation, calls: Sequence[GenerateCall], note: Note) -> Pooled:
    """Vectors as workers give them, in the order of the calls. The first error ends all of them.

    Args:
        note: counts each vector until the answer is sent.

    Raises: what `Generation.prepare`, `Generation.run` and `note` raise.
    """
    prepared = await generation.prepare_all(calls)
    tasks = [asyncio.create_task(_pool(generation, each, note)) for each in prepared]
    try:
        found = await asyncio.gather(*tasks)
        return Pooled(prepared, [vector for vector, _ in found], found[0][1])
    finally:
        for task in tasks:
            task.cancel()


async def _pool(
    generation: Generation, prepared: PreparedRequest, note: Note
) -> tuple[array[float], str]:
    """A vector of float32, and the worker that computed it."""
    async with aclosing(generation.run(prepared)) as text_deltas:
        async for text_delta in text_deltas:
            if text_delta.pooled:
                note(text_delta)
                return array("f", text_delta.pooled), text_delta.worker_id
    raise LoraplexError("the worker returned no vector; it may be older than this gateway")


def finished(vector: Sequence[float], finish: Finish, *, is_unit: bool) -> Sequence[float]:
    """The vector, truncated and normalised as requested; by default normalised if `is_unit`."""
    if finish.dimensions > len(vector):
        why = f"must be at most {len(vector)}, the model's hidden size"
        raise InvalidRequest.field("dimensions", finish.dimensions, why)
    kept = vector[: finish.dimensions or len(vector)]
    return unit(kept) if (is_unit if finish.normalize is None else finish.normalize) else kept


def unit(vector: Sequence[float]) -> Sequence[float]:
    """The vector scaled to length 1; zeros stay zeros."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return array("d", [value / length for value in vector]) if length else vector
