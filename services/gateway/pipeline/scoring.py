"""Scores prompts with an adapter's classification head, as logits and probabilities."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapter_format.pooling_fields import MULTI_LABEL
from loraplex_services.gateway.pipeline.collected_bytes import Note
from loraplex_services.gateway.pipeline.embedding import Pooled, pool_all
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.pooling import is_regression, label_of
from loraplex_services.gateway.request import GenerateCall, RunningAdapter


@dataclass(frozen=True, slots=True)
class PromptScore:
    """The head's answer to one prompt."""

    logits: Sequence[float]
    probabilities: Sequence[float]
    """Empty for a regression."""
    label: str
    """Label of the largest logit; "" for a regression."""


async def score_all(
    generation: Generation, calls: Sequence[GenerateCall], note: Note
) -> tuple[Pooled, list[PromptScore]]:
    """Scores in the order of the calls, one after another as in `prepare_all`. The first error ends
    all of them.

    Raises: what `pool_all` raises.
    """
    pooled = await pool_all(generation, calls, note)
    scores = []
    for prepared, vector in zip(pooled.prepared, pooled.vectors, strict=True):
        scores.append(score_of(prepared.target.adapters[0], vector))
        await asyncio.sleep(0)
    return pooled, scores


def score_of(adapter: RunningAdapter, logits: Sequence[float]) -> PromptScore:
    """The result of transformers' classification pipeline for logits, with every label."""
    if is_regression(adapter):
        return PromptScore(logits, (), "")
    is_multi = adapter.pooling.problem_type == MULTI_LABEL
    probabilities = sigmoids(logits) if is_multi or len(logits) == 1 else softmax(logits)
    best = max(range(len(logits)), key=logits.__getitem__)
    return PromptScore(logits, probabilities, label_of(adapter, best))


def softmax(logits: Sequence[float]) -> Sequence[float]:
    """exp(x) over its sum."""
    top = max(logits)
    powers = [math.exp(value - top) for value in logits]
    total = math.fsum(powers)
    return array("d", [power / total for power in powers])


def sigmoids(logits: Sequence[float]) -> Sequence[float]:
    """1 / (1 + exp(-x)) of each, without overflow."""
    return array("d", [0.5 * (1.0 + math.tanh(0.5 * value)) for value in logits])
