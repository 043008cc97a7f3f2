"""Changes or masks logits before a token is chosen, for all rows of a step together.

Everything here is a function of the request alone, so a request that was preempted or moved
continues as if nothing had happened. As in vLLM, the repetition penalty looks at prompt and output,
and the others look at the output.

The host lists where logits change, as flat indices row * V + token. The lists go to the device in
the sampler's one copy, and each kind of edit is then a few operators whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.sampling.masks import MINUS_INF
from loraplex_services.worker.sampling.next_token import NextToken
from loraplex_services.worker.sampling.output_counts import output_counts
from loraplex_services.worker.transfers import Upload
from loraplex_services.worker.types.request import Constraint, Request


@dataclass(slots=True)
class LogitEdits:
    """The edits of one step. Rows are changed in this order: grammar, bias, penalties, allowed
    tokens, forbidden tokens."""

    num_tokens: int
    """V, the width of the logits."""
    constrained: list[tuple[int, Constraint]] = field(default_factory=list)
    """(row, grammar)."""
    bias_indices: list[int] = field(default_factory=list)
    bias_values: list[float] = field(default_factory=list)
    penalised: list[tuple[int, NextToken]] = field(default_factory=list)
    """(row, token)."""
    restricted: list[int] = field(default_factory=list)
    """Rows that may choose listed tokens only."""
    allowed_indices: list[int] = field(default_factory=list)
    forbidden_indices: list[int] = field(default_factory=list)
    doubtful: list[tuple[int, NextToken, int]] = field(default_factory=list)
    """(index, token, id): forbidden if the token before, which only the device knows, is the id."""
    masked: list[int] = field(default_factory=list)
    """Rows that their edits may leave without any token."""

    def add(self, row: int, token: NextToken, eos_ids: Sequence[int]) -> None:
        """List the edits of a row. Tokens that end the output are forbidden before min_tokens."""
        params, begin = token.params, row * self.num_tokens
        if token.request.constraint is not None:
            self.constrained.append((row, token.request.constraint))
        if params.logit_bias:
            bias = [(i, value) for i, value in params.logit_bias if i < self.num_tokens]
            self.bias_indices += [begin + token_id for token_id, _ in bias]
            self.bias_values += [value for _, value in bias]
        if _is_penalised(token):
            self.penalised.append((row, token))
        if params.allowed_token_ids:
            self.restricted.append(row)
            self.allowed_indices += self._indices(begin, params.allowed_token_ids)
        if params.bad_token_ids:
            self.forbidden_indices += self._indices(begin, params.bad_token_ids)
        if params.bad_sequences:
            self._forbid_ends(begin, token)
        if token.position < params.min_tokens:
            ending = (*params.stop_token_ids, *token.request.eos_ids(eos_ids))
            self.forbidden_indices += self._indices(begin, ending)
        if token.request.constraint is not None or _has_masks(params, token.position):
            self.masked.append(row)

    def _forbid_ends(self, begin: int, token: NextToken) -> None:
        """Forbid the last token of each bad sequence whose others the output ends with."""
        output_ids, end = token.request.output_ids, token.num_known
        is_in_flight = token.follows is not None
        for sequence in token.params.bad_sequences:
            num_known = len(sequence) - 1 - is_in_flight
            begins = end - num_known
            if begins < 0 or (num_known and output_ids[end - 1] != sequence[num_known - 1]):
                continue
            if tuple(output_ids[begins:end]) != sequence[:num_known]:
                continue
            indices = self._indices(begin, sequence[-1:])
            if is_in_flight:
                self.doubtful += [(index, token, sequence[-2]) for index in indices]
            else:
                self.forbidden_indices += indices

    def _indices(self, begin: int, token_ids: Sequence[int]) -> list[int]:
        """Flat indices of tokens in a row. Ids beyond the step's vocabulary are left out, because
        their indices would be in the next row."""
        return [begin + token_id for token_id in token_ids if token_id < self.num_tokens]

    def upload(self, upload: Upload, num_rows: int) -> None:
        """Add the lists to a copy; `apply` follows when it was sent."""
        if self.constrained:
            rows = [row for row, _ in self.constrained]
            upload.add("constrained", np.array(rows, dtype=np.int64))
            upload.add("bitmasks", self._bitmasks())
        if self.bias_indices:
            upload.add("bias_indices", np.array(self.bias_indices, dtype=np.int64))
            upload.add("bias_values", np.array(self.bias_values, dtype=np.float32))
        if self.penalised:
            self._upload_penalties(upload, num_rows)
        if self.restricted:
            upload.add("restricted", np.array(self.restricted, dtype=np.int64))
            upload.add("allowed_indices", np.array(self.allowed_indices, dtype=np.int64))
        if self.forbidden_indices:
            upload.add("forbidden_indices", np.array(self.forbidden_indices, dtype=np.int64))
        if self.doubtful:
            doubtful = [(index, token.follows, before) for index, token, before in self.doubtful]
            upload.add("doubtful", np.array(doubtful, dtype=np.int64).T)

    def apply(self, logits: Tensor, upload: Upload) -> None:
        """Change the logits. Only launches kernels.

        Args:
            logits: `[N, V]` float32, contiguous. Mutated.
        """
        assert logits.is_contiguous(), logits.stride()
        flat = logits.view(-1)
        if self.constrained:
            _constrain(logits, upload["constrained"], upload["bitmasks"])
        if self.bias_indices:
            flat.index_add_(0, upload["bias_indices"], upload["bias_values"])
        if self.penalised:
            _penalise(flat, *self._seen(upload), upload["penalties"], self.num_tokens)
        if self.restricted:
            kept = flat.index_select(0, upload["allowed_indices"])
            logits.index_fill_(0, upload["restricted"], MINUS_INF)
            flat.index_copy_(0, upload["allowed_indices"], kept)
        if self.forbidden_indices:
            flat.index_fill_(0, upload["forbidden_indices"], MINUS_INF)
        if self.doubtful:
            # Adding 0 keeps what another entry for the same index has forbidden.
            outputs = self.doubtful[0][1].outputs
            assert outputs is not None
            indices, follows, before = upload["doubtful"]
            is_bad = outputs.index_select(0, follows) == before
            flat.index_add_(0, indices, torch.where(is_bad, MINUS_INF, 0.0))

    def _bitmasks(self) -> np.ndarray:
        """uint8 `[grammars, ceil(V / 8)]`: bits of allowed tokens, 0 beyond a grammar's own."""
        table = np.zeros((len(self.constrained), -(-self.num_tokens // 8)), dtype=np.uint8)
        for line, (_, constraint) in zip(table, self.constrained, strict=True):
            words = np.frombuffer(constraint.bitmask(), dtype=np.uint8)[: len(line)]
            line[: len(words)] = words
        return table

    def _upload_penalties(self, upload: Upload, num_rows: int) -> None:
        params = np.zeros((num_rows, 3), dtype=np.float32)
        all_ids, all_counts, in_flight = [], [], np.full(num_rows, -1, dtype=np.int64)
        for row, token in self.penalised:
            p = token.params
            params[row] = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
            ids, counts = output_counts(token.request, token.num_known)
            all_ids.append(ids)
            all_counts.append(counts)
            if token.follows is not None:
                in_flight[row] = token.follows
        rows = np.repeat([row for row, _ in self.penalised], [len(ids) for ids in all_ids])
        ids = np.concatenate(all_ids)
        inside = ids < self.num_tokens
        upload.add("penalties", params)
        upload.add("seen_indices", (ids + rows * self.num_tokens)[inside])
        upload.add("seen_counts", np.concatenate(all_counts)[inside])
        rows = np.flatnonzero(in_flight >= 0)
        if len(rows):
            upload.add("in_flight_rows", rows)
            upload.add("in_flight_outputs", in_flight[rows])

    def _seen(self, upload: Upload) -> tuple[Tensor, Tensor]:
        """Flat indices of the tokens that penalised rows have seen, int64, and how often each was
        chosen, float32. A token that only the device knows may occur twice, with one count."""
        indices, counts = upload["seen_indices"], upload["seen_counts"]
        if "in_flight_rows" not in upload:
            return indices, counts
        outputs = next(token.outputs for _, token in self.penalised if token.outputs is not None)
        rows = upload["in_flight_rows"]
        in_flight = outputs.index_select(0, upload["in_flight_outputs"]) + rows * self.num_tokens
        by_row = torch.full_like(upload["penalties"][:, 0], -1, dtype=torch.int64)
        by_row.index_copy_(0, rows, in_flight)
        entry_rows = indices // self.num_tokens
        is_in_flight = indices == by_row.index_select(0, entry_rows)
        counts = counts + is_in_flight
        known = torch.zeros_like(by_row, dtype=torch.float32)
        known.index_add_(0, entry_rows, counts * is_in_flight)
        known = known.index_select(0, rows).clamp(min=1)
        return torch.cat((indices, in_flight)), torch.cat((counts, known))


def edits_of(tokens: Sequence[NextToken], eos_ids: Sequence[int], num_tokens: int) -> LogitEdits:
    """The edits that the rows of a step request.

    Args:
        eos_ids: the base's, which end the output of most requests.
        num_tokens: the width of the logits.
    """
    edits = LogitEdits(num_tokens)
    for row, token in enumerate(tokens):
        if _may_edit(token.request):
            edits.add(row, token, eos_ids)
    return edits


def _may_edit(request: Request) -> bool:
    """Whether any token of a request may be chosen from changed logits."""
    return request.edits_logits or request.constraint is not None


def changes_logits(token: NextToken) -> bool:
    """Whether a token's request may change the logits from which it is chosen."""
    params = token.params
    return _may_edit(token.request) and bool(
        token.request.constraint is not None
        or params.logit_bias
        or _is_penalised(token)
        or token.position < params.min_tokens
        or _has_masks(params, token.position)
    )


def _is_penalised(token: NextToken) -> bool:
    """Whether penalties may change the logits. The first token follows the prompt alone."""
    params = token.params
    return params.has_penalties if token.position else params.repetition_penalty != 1.0


def _has_masks(params: SamplingParams, position: int) -> bool:
    """Whether a request forbids tokens itself. Besides EOS ids, there are always others."""
    return bool(
        params.allowed_token_ids
        or params.bad_token_ids
        or params.bad_sequences
        or (params.stop_token_ids and position < params.min_tokens)
    )


def _constrain(logits: Tensor, rows: Tensor, bitmasks: Tensor) -> None:
    """Forbid every token whose bit is not set."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = ((bitmasks[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] == 0
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, MINUS_INF)
    else:
        cut = logits.index_select(0, rows).masked_fill_(forbidden, MINUS_INF)
        logits.index_copy_(0, rows, cut)


def _penalise(
    flat: Tensor, indices: Tensor, counts: Tensor, penalties: Tensor, num_tokens: int
) -> None:
    """Repetition scales a seen token's logit towards less likely; the others subtract from those of
    chosen tokens.

    Args:
        flat: `[N * V]`. Mutated.
        indices: int64 `[n]`. An index that occurs twice has the same count both times.
        counts: float32 `[n]`: how often the token was chosen; 0 = it is in the prompt only.
        penalties: float32 `[N, 3]`: repetition, frequency, presence.
    """
    repetition, frequency, presence = penalties.index_select(0, indices // num_tokens).unbind(1)
    seen = flat.index_select(0, indices)
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    flat.index_copy_(0, indices, seen - frequency * counts - presence * (counts > 0))
