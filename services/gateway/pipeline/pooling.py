"""Chooses how a call for a vector or a score is pooled, given its adapters. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.adapter_format.pooling_fields import REGRESSION
from loraplex.adapter_format.tasks import CAUSAL_LM, SEQ_CLS
from loraplex.api.pooling import Pooling
from loraplex.errors import InvalidRequest
from loraplex_services.gateway.request import GenerateCall, RunningAdapter, ServedModel

_SCORES = f"it was trained to score (task_type {SEQ_CLS}): ask Score, or POST /classify"
_EMBEDS = "it was trained for vectors (task_type {task}): ask Embed, or POST /v1/embeddings"


def choose_pooling(call: GenerateCall, adapters: Sequence[RunningAdapter]) -> Pooling:
    """How the hidden states of the call's prompt are pooled.

    Raises: InvalidRequest naming the model if an adapter was not trained for the call.
    """
    if call.pooling is Pooling.NONE:
        for adapter in adapters:
            if adapter.task != CAUSAL_LM:
                why = _SCORES if adapter.task == SEQ_CLS else _EMBEDS.format(task=adapter.task)
                field = "adapters" if call.adapters else "model"
                named = f"{adapter.label} does not generate: {why}"
                raise InvalidRequest.field(field, adapter.label, named)
    if call.pooling is Pooling.HEAD and not any(a.pooling.num_labels for a in adapters):
        why = f"has no classification head: scores come from adapters of task_type {SEQ_CLS}"
        raise InvalidRequest.field("model", call.model, f"{call.model} {why}")
    if call.pooling is not Pooling.DEFAULT:
        return call.pooling
    own = {adapter.pooling.pooling for adapter in adapters if adapter.pooling.pooling}
    return Pooling(own.pop()) if len(own) == 1 else Pooling.LAST


def scored_ids(
    prompt_ids: tuple[int, ...], adapters: Sequence[RunningAdapter], base: ServedModel
) -> tuple[int, ...]:
    """The prompt up to its last token that is not padding, which is the one that transformers
    scores.

    A prompt of nothing but padding is scored at its first token, as there.
    """
    own = [a.pooling.pad_token_id for a in adapters if a.pooling.pad_token_id is not None]
    pad_token_id = own[0] if own else base.pad_token_id
    end = len(prompt_ids)
    while end > 1 and prompt_ids[end - 1] == pad_token_id:
        end -= 1
    return prompt_ids[:end]


def normalizes(adapters: Sequence[RunningAdapter]) -> bool:
    """Whether vectors are normalised unless the caller sets it."""
    return all(adapter.pooling.normalize is not False for adapter in adapters)


def labels_of(adapter: RunningAdapter) -> tuple[str, ...]:
    """Names of the head's outputs: the adapter's, or else those that transformers gives them."""
    return tuple(label_of(adapter, index) for index in range(adapter.pooling.num_labels))


def label_of(adapter: RunningAdapter, index: int) -> str:
    """The name of one of the head's outputs."""
    return adapter.pooling.labels[index] if adapter.pooling.labels else f"LABEL_{index}"


def is_regression(adapter: RunningAdapter) -> bool:
    """Whether its outputs are numbers, not labels."""
    return adapter.pooling.problem_type == REGRESSION
