"""From logits to tokens.

    token = argmax over allowed ids of logits / T + noise(seed, sample index, position, id)

which draws from softmax(logits / T) exactly (the Gumbel trick). Temperature 0 is the plain argmax.
Ties go to the lowest id. The noise of a token depends on nothing but its request (see `philox`), so
neighbours in the batch, preemption and migration change nothing.

Logprobs are the model's own: log-softmax of the raw logits, before bias, penalties, masks and
temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.request import Logprobs, Request
from services.worker.sampling.masks import MINUS_INF, edit_logits, truncate
from services.worker.sampling.philox import GUMBEL_MAX, GUMBEL_MIN, gumbel

MAX_LOGIT_ROWS = 1024
"""Most rows of the vocabulary's width that exist at once."""

MIN_TEMPERATURE = 1e-5
"""Lower temperatures choose the argmax: dividing by them would overflow."""

LogitsOf = Callable[[Tensor], Tensor]
"""Maps token rows of the batch, int64 `[n]`, to fresh logits, float32 `[n, V]`. The rows are on the
host: asking a device for them would wait for the step."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, with logprobs when the request asked for them."""

    token_id: int | None
    """None where a grammar and the other masks leave no token."""
    logprobs: Logprobs | None


def sample(
    token_rows: Tensor, requests: Sequence[Request], logits_of: LogitsOf, eos_ids: Sequence[int]
) -> list[Sampled]:
    """Choose one token for each request, at output position `len(output_ids)`.

    Args:
        token_rows: int64 `[N]`, each request's last known token in the batch.
        eos_ids: masked, like stop tokens, until a request's `min_tokens` are there.
    """
    out: list[Sampled] = []
    for begin in range(0, len(requests), MAX_LOGIT_ROWS):
        end = begin + MAX_LOGIT_ROWS
        out += _sample_chunk(logits_of(token_rows[begin:end]), requests[begin:end], eos_ids)
    return out


def _sample_chunk(
    logits: Tensor, requests: Sequence[Request], eos_ids: Sequence[int]
) -> list[Sampled]:
    asking = [i for i, request in enumerate(requests) if request.sampling.logprobs is not None]
    raw = logits[asking].log_softmax(dim=-1) if asking else None
    edit_logits(logits, requests, eos_ids)
    token_ids = _first_argmax(logits)
    drawing = [i for i, r in enumerate(requests) if r.sampling.temperature >= MIN_TEMPERATURE]
    if drawing:
        token_ids[drawing] = _draw(logits[drawing], [requests[i] for i in drawing])
    ids: list[int] = token_ids.tolist()
    logprobs: dict[int, Logprobs] = {}
    if raw is not None:
        tops = [requests[i].sampling.logprobs or 0 for i in asking]
        entries = logprob_entries(raw, [ids[i] for i in asking], tops)
        logprobs = dict(zip(asking, entries, strict=True))
    stuck = {
        i for i, r in enumerate(requests) if r.constraint is not None and not _any_left(logits[i])
    }
    return [
        Sampled(None, None) if i in stuck else Sampled(token_id, logprobs.get(i))
        for i, token_id in enumerate(ids)
    ]


def _first_argmax(scores: Tensor) -> Tensor:
    """int64 `[N]`: the lowest id of each row's maximum. On CPUs numpy's is ten times torch's."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def _any_left(row: Tensor) -> bool:
    return bool(row.amax() > MINUS_INF)


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Gumbel argmax of the truncated, tempered logits `[N, V]`; int64 `[N]`."""
    params = [request.sampling for request in requests]
    temperature = torch.tensor([p.temperature for p in params], device=logits.device)
    scaled = logits / temperature[:, None]
    truncate(scaled, params)
    return _first_argmax(_add_noise(scaled, requests))


def _add_noise(scaled: Tensor, requests: Sequence[Request]) -> Tensor:
    """scaled + noise where it can win, -inf elsewhere.

    Noise is bounded, so a token further below the row's maximum than the bounds are apart never
    wins; skipping it changes no draw and spares most of a large vocabulary.
    """
    reach = GUMBEL_MAX - GUMBEL_MIN + 0.5
    floor = scaled.amax(dim=-1, keepdim=True) - reach
    rows, ids = torch.nonzero(scaled >= floor, as_tuple=True)
    keys = [[_signed(r.sampling.seed), len(r.output_ids), r.sample_index] for r in requests]
    seeds, positions, samples = torch.tensor(keys, device=scaled.device)[rows].unbind(dim=-1)
    scores = torch.full_like(scaled, MINUS_INF)
    scores[rows, ids] = scaled[rows, ids] + gumbel(seeds, ids, positions, samples)
    return scores


def _signed(seed: int) -> int:
    """The 64 bits of a seed as the int64 with the same bits."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def logprob_entries(
    logprobs: Tensor, token_ids: Sequence[int], tops: Sequence[int]
) -> list[Logprobs]:
    """Pick each row's token and its `tops[i]` most likely tokens from log-softmax rows `[N, V]`."""
    num_top = min(max(tops), logprobs.shape[-1])
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logprobs.device)[:, None])
    values, ids = logprobs.topk(num_top, dim=-1)
    rows = zip(token_ids, chosen[:, 0].tolist(), ids.tolist(), values.tolist(), tops, strict=True)
    return [
        Logprobs(token_id, logprob, tuple(zip(top_ids[:num], top_values[:num], strict=True)))
        for token_id, logprob, top_ids, top_values, num in rows
    ]


def score_tokens(
    token_rows: Tensor, next_ids: Sequence[int], num_top: int, logits_of: LogitsOf
) -> list[Logprobs]:
    """Logprobs of known next tokens: `next_ids[i]` follows token row i. For prompt logprobs."""
    out: list[Logprobs] = []
    for begin in range(0, len(next_ids), MAX_LOGIT_ROWS):
        end = begin + MAX_LOGIT_ROWS
        ids = next_ids[begin:end]
        logprobs = logits_of(token_rows[begin:end]).log_softmax(dim=-1)
        out += logprob_entries(logprobs, ids, [num_top] * len(ids))
    return out
