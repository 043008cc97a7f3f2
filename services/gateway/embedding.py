"""Vectors of prompts: the last token's hidden state, of length 1, from a base or an adapter."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing

from loraplex.errors import LoraplexError
from services.gateway.generation import Generation, Prepared
from services.gateway.request import AskedSampling, GenerateCall, Prompt

NO_OUTPUT = AskedSampling(max_tokens=0, echo=True)
"""Only a request that echoes may generate nothing; the echo itself is never asked for."""


def embed_call(
    request_id: str,
    tenant: str,
    model: str,
    prompt: Prompt,
    *,
    split_key: str = "",
    timeout_s: float | None = None,
    trace: str = "",
) -> GenerateCall:
    """The call that embeds one prompt."""
    return GenerateCall(
        request_id=request_id,
        tenant=tenant,
        model=model,
        prompt=prompt,
        sampling=NO_OUTPUT,
        split_key=split_key,
        timeout_s=timeout_s,
        trace=trace,
        pools=True,
    )


async def embed_all(
    generation: Generation, calls: Sequence[GenerateCall]
) -> tuple[list[Prepared], list[tuple[float, ...]]]:
    """Vectors in the order of the calls. The first error ends all of them.

    Raises: what `Generation.prepare` and `Generation.run` raise.
    """
    prepared = await asyncio.gather(*[generation.prepare(call) for call in calls])
    tasks = [asyncio.create_task(_embed(generation, each)) for each in prepared]
    try:
        return prepared, list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _embed(generation: Generation, prepared: Prepared) -> tuple[float, ...]:
    async with aclosing(generation.run(prepared)) as pieces:
        async for piece in pieces:
            if piece.pooled:
                return unit(piece.pooled)
    raise LoraplexError("the worker gave no vector; is it older than this gateway?")


def unit(vector: Sequence[float]) -> tuple[float, ...]:
    """The vector scaled to length 1; zeros stay zeros."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return tuple(value / length for value in vector) if length else tuple(vector)
