"""Turns a step's hidden states into the results of its rows.

Tokens are chosen on the device and stay there for the next step to read; when `TokenChooser.choose`
returns, the copies that the host needs have begun, and `StepResults.read` waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loraplex.api.output import PackedLogprobs, TokenLogprob
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.runner.parallel.shared_head import LeadingHead
from loraplex_services.worker.runner.pooling import PooledRows, pool
from loraplex_services.worker.runner.step_inputs import StepInputs
from loraplex_services.worker.sampling.drawing import DrawOperators
from loraplex_services.worker.sampling.logprobs import LogprobRows
from loraplex_services.worker.sampling.next_token import next_tokens
from loraplex_services.worker.sampling.sampler import Choices, LogitsOf, sample, score_tokens
from loraplex_services.worker.transfers import to_device, to_host
from loraplex_services.worker.types.step_plan import (
    PlannedRow,
    Sampled,
    SampledRow,
    StepPlan,
)


@dataclass(frozen=True, slots=True)
class StepResults:
    """The results of a step, which may still run on the device."""

    plan: StepPlan
    choices: Choices
    scores: Sequence[Sequence[LogprobRows]]
    """Logprobs of the prompts of the plan's first rows; empty if no row asks for any."""
    pooled: PooledRows | None
    end: torch.cuda.Event | None
    proposals: Mapping[int, int] = field(default_factory=dict)
    """By index of the planned row: see `proposals`."""
    experts: Tensor | None = None
    """`[T, layers, k]` on the host: see `RoutingNotes`; None if no row asks for them."""

    @property
    def outputs(self) -> Tensor:
        """int64 `[n]` on the device: the tokens chosen, in the order of rows that choose one."""
        return self.choices.token_ids

    def read(self) -> list[SampledRow]:
        """Wait for the step, and return plain values in the order of the plan's rows."""
        if self.end is not None:
            self.end.synchronize()
        token_ids, logprobs = self.choices.read()
        contexts, generations = self.plan.contexts, self.plan.generations
        chosen = iter(enumerate(token_ids))
        out = [_sampled(row, chosen, logprobs) for row in contexts]
        rest = [SampledRow(token_id, logprobs.get(i)) for i, token_id in chosen]
        if len(rest) < len(generations):  # some have only computed a position
            found = iter(rest)
            rest = [next(found) if row.chooses else SampledRow() for row in generations]
        out += rest
        for sampled, parts in zip(out, self.scores, strict=False):
            packed = (part.packed() for part in parts)
            sampled.prompt_logprobs = reduce(PackedLogprobs.followed_by, packed, PackedLogprobs())
        if self.pooled is not None:
            for sampled, vector in zip(out, self.pooled.read(), strict=False):
                sampled.pooled = vector
        for index, proposal in self.proposals.items():
            out[index].proposal = proposal
        if self.experts is not None:
            self._add_experts(out, self.experts)
        return out

    def _add_experts(self, out: list[SampledRow], experts: Tensor) -> None:
        end = 0
        for row, sampled in zip(self.plan.rows, out, strict=True):
            begin, end = end, end + row.num_tokens
            if row.request.routed_from is not None:
                sampled.experts = experts[begin:end].numpy().tobytes()


class ForwardOutput(NamedTuple):
    """The results of a forward pass that sampling reads."""

    hidden: Tensor
    """`[T, H]`."""
    lora: LoraBatch
    """The adapters of its rows."""
    batch: ForwardBatch | None = None
    """Its inputs, where they are not those of a graph."""


@dataclass(slots=True, eq=False)
class TokenChooser:
    """Chooses the tokens of one base's steps."""

    model: Decoder
    eos_ids: Sequence[int]
    draws: DrawOperators
    """The draws of the model's operators."""
    shared: LeadingHead | None = None
    """The head, if ranks divide its tokens."""

    def choose(self, step: StepInputs, output: ForwardOutput, before: Tensor) -> StepResults:
        """Choose a token for each row that is to have one.

        A row's prompt logprobs hold one entry for each computed position p whose successor p + 1 is
        a prompt token, and score that successor; over all chunks of a prompt of n tokens they are
        n - 1 entries. The first prompt token has none.

        Args:
            before: the outputs of the step before.
        """
        hidden, lora, batch = output
        contexts = step.plan.contexts
        experts = self._noted_experts(batch)
        logits_of = partial(self._logits_of, hidden, lora)
        tokens = next_tokens(step.plan.rows, before)
        token_rows = _choosing_rows(step, len(tokens))
        scores = _score_prompts(contexts, logits_of)
        if self.shared is None:
            best = partial(self._best_of, hidden, lora) if self.model.finds_best else None
            choices = sample(token_rows, tokens, logits_of, self.eos_ids, self.draws, best)
        else:
            choices = self.shared.choose(token_rows, tokens, hidden, lora, logits_of, self.eos_ids)
        pooled = pool(contexts, hidden, lora, self.model.scores)
        end = None
        if hidden.is_cuda:
            end = torch.cuda.Event()
            end.record()
        return StepResults(step.plan, choices, scores, pooled, end, experts=experts)

    def _logits_of(self, hidden: Tensor, lora: LoraBatch, token_rows: Tensor) -> Tensor:
        if self.shared is not None:
            self.shared.announce(token_rows)
        return self.model.logits(*select_rows(hidden, lora, token_rows))

    def _best_of(self, hidden: Tensor, lora: LoraBatch, token_rows: Tensor) -> Tensor | None:
        return self.model.best_tokens(*select_rows(hidden, lora, token_rows))

    def _noted_experts(self, batch: ForwardBatch | None) -> Tensor | None:
        """See `StepResults.experts`."""
        if batch is None or batch.routing is None or self.model.routing is None:
            return None
        return to_host(batch.routing.of_tokens(self.model.routing))


def _choosing_rows(step: StepInputs, num_tokens: int) -> Tensor:
    """int64 on the host, ascending: the token rows after which `num_tokens` tokens are chosen."""
    contexts = step.plan.contexts
    last_rows = np.cumsum(step.num_tokens) - 1
    spans = [
        range(last - len(row.drafts), last + 1)
        for row, last in zip(contexts, last_rows.tolist(), strict=False)
        if row.chooses
    ]
    of_contexts = np.array(list(chain.from_iterable(spans)), dtype=np.int64)
    others = last_rows[len(contexts) :]
    if len(of_contexts) + len(others) > num_tokens:
        others = others[[row.chooses for row in step.plan.generations]]
    return torch.from_numpy(np.concatenate((of_contexts, others)))


def _sampled(
    row: PlannedRow, chosen: Iterator[tuple[int, int | None]], logprobs: Mapping[int, TokenLogprob]
) -> SampledRow:
    """The tokens of a row, which are the next of those `chosen`: the first, and that after each
    draft as long as drafts equal the tokens chosen before them."""
    if not row.chooses:
        return SampledRow()
    own = islice(chosen, 1 + len(row.drafts))
    first, *others = (Sampled(token_id, logprobs.get(i)) for i, token_id in own)
    sampled = SampledRow(first.token_id, first.logprobs)
    if others:
        num_right = row.num_right([each.token_id for each in (first, *others)])
        sampled.further = tuple(others[:num_right])
    return sampled


def select_rows(hidden: Tensor, lora: LoraBatch, token_rows: Tensor) -> tuple[Tensor, LoraBatch]:
    """The hidden states of some token rows, ascending, and their adapters."""
    if len(token_rows) == len(hidden):  # ascending, so these are all rows in order
        return hidden, lora
    chosen = lora.select(token_rows.tolist())
    return hidden.index_select(0, to_device(token_rows, hidden.device)), chosen


def take_outputs(input_ids: Tensor, step: StepInputs, outputs: Tensor) -> None:
    """Insert the tokens that the previous step chose and that only the device knows.

    Args:
        input_ids: int64 `[T]`. Mutated.
        outputs: of the step before.
    """
    if step.follows.shape[1]:
        token_rows, sources = to_device(torch.from_numpy(step.follows), input_ids.device)
        input_ids.index_copy_(0, token_rows, outputs.index_select(0, sources))


def _score_prompts(rows: Sequence[PlannedRow], logits_of: LogitsOf) -> list[list[LogprobRows]]:
    """Logprobs of rows in the context phase, which come first in a step."""
    if all(row.request.sampling.prompt_logprobs is None for row in rows):
        return []
    out: list[list[LogprobRows]] = []
    end = 0
    for row in rows:
        begin, end = end, end + row.num_tokens
        num_top, prompt = row.request.sampling.prompt_logprobs, row.request.prompt_ids
        next_ids = prompt[row.start + 1 : row.start + 1 + row.num_tokens]
        if num_top is None or not next_ids:
            out.append([])
            continue
        token_rows = torch.arange(begin, begin + len(next_ids))
        out.append(score_tokens(token_rows, next_ids, num_top, logits_of))
    return out
