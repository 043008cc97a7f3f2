"""Computes vectors of prompts with a base or an adapter."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from loraplex.api.output import ServedBy, Usage
from loraplex.api.sampling import Sampling
from loraplex.errors import InvalidRequest, LoraplexError
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.pooling import normalizes
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import GenerateCall

NO_OUTPUT = Sampling(max_tokens=0, echo=True)
"""Sampling of calls that end with one vector. Only a request with echo may generate no tokens; the
echo itself is not used."""


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
    vectors: list[tuple[float, ...]]
    worker_id: str
    """Worker of the first vector."""

    @property
    def usage(self) -> Usage:
        """Prompt tokens over all calls."""
        return Usage(prompt_tokens=sum(len(each.prompt_ids) for each in self.prepared))

    @property
    def served_by(self) -> ServedBy:
        """What ran, with the worker of the first call."""
        return self.prepared[0].served_by(self.worker_id)


async def embed_all(
    generation: Generation, calls: Sequence[GenerateCall], finish: Finish
) -> Pooled:
    """Finished vectors in the order of the calls. The first error ends all of them.

    Raises: InvalidRequest for more dimensions than there are; what `pool_all` raises.
    """
    pooled = await pool_all(generation, calls)
    vectors = [
        finished(vector, finish, is_unit=normalizes(prepared.target.adapters))
        for prepared, vector in zip(pooled.prepared, pooled.vectors, strict=True)
    ]
    return Pooled(pooled.prepared, vectors, pooled.worker_id)


async def pool_all(generation: Generation, calls: Sequence[GenerateCall]) -> Pooled:
    """Vectors as workers give them, in the order of the calls. The first error ends all of them.

    Raises: what `Generation.prepare` and `Generation.run` raise.
    """
    prepared = await generation.prepare_all(calls)
    tasks = [asyncio.create_task(_pool(generation, each)) for each in prepared]
    try:
        found = await asyncio.gather(*tasks)
        return Pooled(prepared, [vector for vector, _ in found], found[0][1])
    finally:
        for task in tasks:
            task.cancel()


async def _pool(generation: Generation, prepared: PreparedRequest) -> tuple[tuple[float, ...], str]:
    """A vector, and the worker that computed it."""
    async with aclosing(generation.run(prepared)) as text_deltas:
        async for text_delta in text_deltas:
            if text_delta.pooled:
                return text_delta.pooled, text_delta.worker_id
    raise LoraplexError("the worker returned no vector; it may be older than this gateway")


def finished(vector: Sequence[float], finish: Finish, *, is_unit: bool) -> tuple[float, ...]:
    """The vector, truncated and normalised as requested; by default normalised if `is_unit`."""
    if finish.dimensions > len(vector):
        why = f"must be at most {len(vector)}, the model's hidden size"
        raise InvalidRequest.field("dimensions", finish.dimensions, why)
    kept = tuple(vector[: finish.dimensions or len(vector)])
    return unit(kept) if (is_unit if finish.normalize is None else finish.normalize) else kept


def unit(vector: Sequence[float]) -> tuple[float, ...]:
    """The vector scaled to length 1; zeros stay zeros."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return tuple(value / length for value in vector) if length else tuple(vector)
