"""Scores prompts with an adapter's classification head, as logits and probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapter_format.pooling_fields import MULTI_LABEL
from loraplex_services.gateway.pipeline.embedding import Pooled, pool_all
from loraplex_services.gateway.pipeline.generation import Generation
from loraplex_services.gateway.pipeline.pooling import is_regression, labels_of
from loraplex_services.gateway.request import GenerateCall, RunningAdapter


@dataclass(frozen=True, slots=True)
class PromptScore:
    """The head's answer to one prompt."""

    logits: tuple[float, ...]
    probabilities: tuple[float, ...]
    """Empty for a regression."""
    label: str
    """Label of the largest logit; "" for a regression."""


async def score_all(
    generation: Generation, calls: Sequence[GenerateCall]
) -> tuple[Pooled, list[PromptScore]]:
    """Scores in the order of the calls. The first error ends all of them.

    Raises: what `Generation.prepare` and `Generation.run` raise.
    """
    pooled = await pool_all(generation, calls)
    pairs = zip(pooled.prepared, pooled.vectors, strict=True)
    return pooled, [score_of(prepared.target.adapters[0], vector) for prepared, vector in pairs]


def score_of(adapter: RunningAdapter, logits: Sequence[float]) -> PromptScore:
    """What transformers' classification pipeline makes of logits, every label kept."""
    if is_regression(adapter):
        return PromptScore(tuple(logits), (), "")
    is_multi = adapter.pooling.problem_type == MULTI_LABEL
    probabilities = sigmoids(logits) if is_multi or len(logits) == 1 else softmax(logits)
    best = max(range(len(logits)), key=logits.__getitem__)
    return PromptScore(tuple(logits), probabilities, labels_of(adapter)[best])


def softmax(logits: Sequence[float]) -> tuple[float, ...]:
    """exp(x) over its sum."""
    top = max(logits)
    powers = [math.exp(value - top) for value in logits]
    total = math.fsum(powers)
    return tuple(power / total for power in powers)


def sigmoids(logits: Sequence[float]) -> tuple[float, ...]:
    """1 / (1 + exp(-x)) of each, without overflow."""
    return tuple(0.5 * (1.0 + math.tanh(0.5 * value)) for value in logits)
