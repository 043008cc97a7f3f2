"""Chooses tokens from logits.

    token = argmax over allowed ids of logits / T + noise(seed, sample index, position, id)

which draws from softmax(logits / T) exactly (the Gumbel trick). Temperature 0 is the plain argmax.
Ties go to the lowest id. The noise of a token depends only on its request (see `philox`), so the
other requests of a batch, preemption and migration do not change tokens.

Logprobs are the model's own: log-softmax of the raw logits, before bias, penalties, masks and
temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loraplex.api.output import TokenLogprob
from loraplex_services.worker.sampling.drawing import (
    MIN_TEMPERATURE,
    TORCH_DRAWS,
    DrawOperators,
    draws_of,
    is_drawn,
)
from loraplex_services.worker.sampling.edits import changes_logits, edits_of
from loraplex_services.worker.sampling.logprobs import (
    ListedTokens,
    LogprobRows,
    logprob_rows,
    logprobs_of,
    padded_ids,
    ranks_of,
)
from loraplex_services.worker.sampling.masks import MINUS_INF, limits_of
from loraplex_services.worker.sampling.next_token import NextToken
from loraplex_services.worker.transfers import Upload, to_host

MAX_LOGIT_ROWS = 1024
"""Most rows of the width of the vocabulary that exist at the same time."""

LogitsOf = Callable[[Tensor], Tensor]
"""Maps token rows of the batch, int64 `[n]`, to fresh logits, float32 `[n, V]`. The rows are on the
host: asking a device for them would wait for the step."""

BestOf = Callable[[Tensor], Tensor | None]
"""Maps token rows to the first best of their logits, int64 `[n]`; None if an adapter of these rows
changes the head."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Tokens chosen by a step, which may still run on the device."""

    token_ids: Tensor
    """int64 `[N]`, on the device."""
    chunks: Sequence[ChosenChunk]
    order: Sequence[int] | None = None
    """The index of each token in the chunks; None = they are in order."""

    def read(self) -> tuple[list[int | None], dict[int, TokenLogprob]]:
        """The tokens as `Sampled.token_id`, and the logprobs of those whose requests ask for them,
        by index of the token. The step is done."""
        token_ids: list[int | None] = []
        logprobs: dict[int, TokenLogprob] = {}
        for chunk in self.chunks:
            logprobs |= {len(token_ids) + row: entry for row, entry in chunk.read_logprobs()}
            token_ids += chunk.read_tokens()
        if self.order is None:
            return token_ids, logprobs
        by_token = ((i, logprobs.get(index)) for i, index in enumerate(self.order))
        ordered = {i: entry for i, entry in by_token if entry is not None}
        return [token_ids[index] for index in self.order], ordered


@dataclass(frozen=True, slots=True)
class ChosenChunk:
    """A part of `Choices`. Its tensors are on the host when the step is done."""

    token_ids: Tensor
    asking: Sequence[int]
    """Rows that request logprobs."""
    logprobs: LogprobRows | None
    masked: Sequence[int]
    """Rows that their edits may leave without any token."""
    best: Tensor | None
    """float32: the highest logit that is left in each of these rows."""

    def read_tokens(self) -> list[int | None]:
        """The token of each row; None where none is left."""
        token_ids: list[int | None] = self.token_ids.tolist()
        if self.best is not None:
            for row, best in zip(self.masked, self.best.tolist(), strict=True):
                if best == MINUS_INF:
                    token_ids[row] = None
        return token_ids

    def read_logprobs(self) -> Iterable[tuple[int, TokenLogprob]]:
        """Rows that request logprobs, and their logprobs."""
        return zip(self.asking, self.logprobs.read() if self.logprobs else (), strict=True)


def needs_best_only(token: NextToken, num_tokens: int) -> bool:
    """Whether a token follows from the best of its row's `num_tokens` scores with their noise, so
    that nobody needs the row's other logits."""
    params = token.params
    if params.logprobs is not None or changes_logits(token):
        return False
    return not is_drawn(token) or limits_of((params,), num_tokens) is None


def _takes_best(token: NextToken) -> bool:
    return not is_drawn(token) and needs_best_only(token, 0)


def sample(
    token_rows: Tensor,
    tokens: Sequence[NextToken],
    logits_of: LogitsOf,
    eos_ids: Sequence[int],
    operators: DrawOperators = TORCH_DRAWS,
    best_of: BestOf | None = None,
) -> Choices:
    """Choose each of `tokens`.

    Args:
        token_rows: int64 `[N]`, each request's last token in the batch.
        eos_ids: masked, like stop tokens, until a request's `min_tokens` are there.
        operators: what rows with a temperature are truncated and drawn by.
        best_of: used where the best logit of each row is all that is needed; None = nothing finds
            it without logits.
    """
    token_ids, chunks = [], []
    for begin in range(0, len(tokens), MAX_LOGIT_ROWS):
        end = begin + MAX_LOGIT_ROWS
        ids = None
        if best_of is not None and all(map(_takes_best, tokens[begin:end])):
            ids = best_of(token_rows[begin:end])
        if ids is not None:
            chunk = ChosenChunk(to_host(ids), (), None, (), None)
        else:
            logits = logits_of(token_rows[begin:end])
            ids, chunk = _sample_chunk(logits, tokens[begin:end], eos_ids, operators)
        token_ids.append(ids)
        chunks.append(chunk)
    if not chunks:
        return Choices(token_rows, ())
    return Choices(token_ids[0] if len(token_ids) == 1 else torch.cat(token_ids), chunks)


def _sample_chunk(
    logits: Tensor, tokens: Sequence[NextToken], eos_ids: Sequence[int], operators: DrawOperators
) -> tuple[Tensor, ChosenChunk]:
    params = [token.request.sampling for token in tokens]
    asking = [i for i, each in enumerate(params) if each.logprobs is not None]
    drawing = [i for i, each in enumerate(params) if each.temperature >= MIN_TEMPERATURE]
    upload = Upload()
    edits = edits_of(tokens, eos_ids, logits.shape[-1])
    edits.upload(upload, len(tokens))
    _upload_draws(upload, [tokens[i] for i in drawing], logits.shape[-1])
    listed = [params[i].logprob_token_ids for i in asking]
    if any(listed):
        upload.add("listed", padded_ids(listed))
    for name, rows in (("asking", asking), ("drawing", drawing), ("masked", edits.masked)):
        upload.add(name, np.array(rows, dtype=np.int64))
    upload.send(logits.device)

    raw = _rows(logits, upload["asking"]).log_softmax(dim=-1) if asking else None
    edits.apply(logits, upload)
    token_ids = operators.argmax(logits)
    best = None
    if edits.masked:
        best = to_host(_rows(logits, upload["masked"]).amax(dim=-1))
    if drawing:
        drawn = _draw(_rows(logits, upload["drawing"]), upload, operators)
        token_ids.index_copy_(0, upload["drawing"], drawn)
    logprobs = None
    if raw is not None:
        tops = [params[i].logprobs or 0 for i in asking]
        logprobs = logprob_rows(raw, _rows(token_ids, upload["asking"]), tops)
        if any(listed):
            values = logprobs_of(raw, upload["listed"])
            logprobs = replace(logprobs, listed=ListedTokens(listed, values))
    return token_ids, ChosenChunk(to_host(token_ids), asking, logprobs, edits.masked, best)


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    """A copy of some rows, or all of them as they are. `rows` is int64, ascending."""
    return values if len(rows) == len(values) else values.index_select(0, rows)


def _upload_draws(upload: Upload, tokens: Sequence[NextToken], num_tokens: int) -> None:
    """The tensors that `_draw` reads of rows with a temperature."""
    if not tokens:
        return
    draws = draws_of(tokens)
    upload.add("temperatures", draws.temperatures)
    upload.add("keys", draws.keys)
    limits = limits_of([token.params for token in tokens], num_tokens)
    if limits is not None:
        upload.add("limits", limits)


def _draw(logits: Tensor, upload: Upload, operators: DrawOperators) -> Tensor:
    """Gumbel argmax of the truncated, tempered logits `[N, V]`; int64 `[N]`. Mutates: logits."""
    scaled = logits.div_(upload["temperatures"][:, None])
    if "limits" in upload:
        operators.truncate(scaled, upload["limits"])
    return operators.draw(scaled, upload["keys"], 0)


def score_tokens(
    token_rows: Tensor, next_ids: Sequence[int], num_top: int, logits_of: LogitsOf
) -> list[LogprobRows]:
    """Logprobs of known next tokens: `next_ids[i]` follows token row i. For prompt logprobs."""
    out = []
    for begin in range(0, len(next_ids), MAX_LOGIT_ROWS):
        end = begin + MAX_LOGIT_ROWS
        ids = torch.tensor(next_ids[begin:end])
        logprobs = logits_of(token_rows[begin:end]).log_softmax(dim=-1)
        rows = logprob_rows(logprobs, ids, [num_top] * len(ids))
        out.append(replace(rows, ranks=ranks_of(logprobs, ids)))
    return out
