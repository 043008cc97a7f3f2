"""Merges the outputs of several prompts into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from loraplex_services.gateway.request import TextDelta

TextDeltas = AsyncGenerator[TextDelta]


async def interleaved(sources: list[TextDeltas]) -> TextDeltas:
    """Merge several iterators in order of arrival; the first error ends all of them."""
    queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue()

    async def pump(source: TextDeltas) -> None:
        try:
            async with aclosing(source):
                async for text_delta in source:
                    queue.put_nowait(text_delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
