"""Scores pairs of texts: with an adapter's head, or by comparing their vectors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from loraplex.api.pooling import Pooling
from loraplex.api.request import Prompt, TextPrompt
from loraplex.errors import InvalidRequest
from loraplex_services.gateway.pipeline.collected_bytes import Note
from loraplex_services.gateway.pipeline.embedding import Finish, Pooled, embed_all
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.scoring import score_all
from loraplex_services.gateway.request import GenerateCall, Target

Pair = tuple[str, str]
Calls = Callable[[Sequence[Prompt], Pooling], Sequence[GenerateCall]]
"""Calls for vectors or logits of prompts."""


async def rank_all(
    generation: Generation,
    target: Target,
    pairs: Sequence[Pair],
    calls: Calls,
    note: Note,
    *,
    use_activation: bool,
) -> tuple[Pooled, list[float]]:
    """A score for each pair, and what was run.

    An adapter with a head of one label gives the sigmoid of its logit for the pair, or the logit
    without `use_activation` or for a regression. Without a head, it is the cosine of the vectors.

    Raises: InvalidRequest for a head with several labels; what `score_all` and `embed_all` raise.
    """
    num_labels = max((adapter.pooling.num_labels for adapter in target.adapters), default=0)
    if not num_labels:
        return await _cosines(generation, pairs, calls, note)
    if num_labels > 1:
        why = f"its head has {num_labels} labels, and a score needs one with a single label"
        raise InvalidRequest.field("model", target.adapters[0].label, f"{why}: use /classify")
    prompts = [TextPrompt(first, pair=second) for first, second in pairs]
    pooled, scores = await score_all(generation, calls(prompts, Pooling.HEAD), note)
    return pooled, [
        (score.probabilities[0] if score.probabilities and use_activation else score.logits[0])
        for score in scores
    ]


async def _cosines(
    generation: Generation, pairs: Sequence[Pair], calls: Calls, note: Note
) -> tuple[Pooled, list[float]]:
    """Each text is embedded once."""
    index_of = {
        text: index for index, text in enumerate(dict.fromkeys(t for p in pairs for t in p))
    }
    prompts = [TextPrompt(text) for text in index_of]
    finish = Finish(normalize=True)
    embedded = await embed_all(generation, calls(prompts, Pooling.DEFAULT), finish, note)
    vectors, cosines = embedded.vectors, []
    for first, second in pairs:
        cosines.append(cosine(vectors[index_of[first]], vectors[index_of[second]]))
        await asyncio.sleep(0)
    return embedded, cosines


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """The cosine of vectors of length 1, which rounding would take out of its range."""
    dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
    return min(max(dot, -1.0), 1.0)
