"""The token budget of a step, and how requests share it.

Requests that decode come first, with one token each. Prompts share the rest of the budget. While
requests decode, prompts get less, because a prompt of thousands of tokens would delay every stream
of the worker for the duration of its step. Several prompts get no more than that even where nothing
decodes: computed together, all would wait for the last one.

Source: Agrawal et al., Sarathi-Serve (stall-free batching); the size of a chunk comes from steps
that were measured here instead of from a profile.
"""

from __future__ import annotations

from loraplex_services.worker.scheduling.running import RunningBatch, running_order
from loraplex_services.worker.scheduling.samples import Samples, SizedSamples
from loraplex_services.worker.types.step_plan import StepPlan

MIN_PROMPT_TOKENS = 64
"""Fewest prompt tokens of a step while prompts wait: a smaller step would hardly be faster."""
MAX_STRETCH = 4.0
"""If a step without prompts is long already, prompts may make it this many times as long."""
NUM_RECENT = 15
"""Number of recent steps of each kind of which the median is taken."""


class TokenBudget:
    """Shares the positions of a step among requests, and learns from steps how long they take."""

    def __init__(self, max_tokens: int, max_step_s: float) -> None:
        """`max_tokens`: of a step. `max_step_s`: of a step in which requests decode; 0 = no
        limit."""
        self._max_tokens = max_tokens
        self._max_step_s = max_step_s
        self._decodes = SizedSamples(NUM_RECENT)
        """Steps without prompts, by number of rows."""
        self._tokens = Samples(NUM_RECENT)
        """The time that one prompt token adds to a step."""
        self.max_prompt_tokens = max_tokens
        """Most prompt tokens of the step that was shared out last, unless it has a single prompt
        and nothing else."""
        self.is_cutting = False
        """Whether a running prompt continues in the step after the one that was shared out last."""

    def measure(self, plan: StepPlan, elapsed_s: float) -> None:
        """Note that the step of `plan` took `elapsed_s`."""
        num_prompt = plan.num_prompt_tokens
        if not plan.num_contexts:
            self._decodes.add(len(plan.rows), elapsed_s)
        elif num_prompt >= MIN_PROMPT_TOKENS:
            decode_s = self._decode_s(len(plan.generations))
            self._tokens.add(max(0.0, elapsed_s - decode_s) / num_prompt)

    def max_tokens_without_decoding(self, running: RunningBatch) -> int:
        """Most tokens of a step that computes only prompts while the `running` requests wait for
        it."""
        return self.max_prompt_tokens if running.decoding else self._max_tokens

    def share(self, running: RunningBatch, has_waiting: bool) -> tuple[dict[str, int], int]:
        """Tokens of each running request that does not decode, and what the step has left for
        others: prompts by arrival, those about to end before others.

        While requests wait, a prompt that the step cannot complete takes at most half, so that
        short prompts need not wait for the end of a long one.
        """
        num_decoding = sum(not member.request.is_held for member in running.decoding)
        self.max_prompt_tokens = self._prompt_tokens_beside(num_decoding)
        left = self._max_tokens - num_decoding
        prompts = [member.request for member in running.prompts.values()]
        if num_decoding or len(prompts) + (bool(prompts) and has_waiting) > 1:
            left = min(left, self.max_prompt_tokens)
        kept = left // 2 if has_waiting else 0
        shares = {}
        self.is_cutting = False
        for request in sorted(running_order(prompts), key=lambda request: request.num_pending > 1):
            num_wanted = 0 if request.is_held else request.num_pending
            if num_wanted > left:
                self.is_cutting, num_wanted = True, max(0, left - kept)
            shares[request.request_id] = num_wanted
            left -= num_wanted
        return shares, left

    def left_after(self, num_started: int, budget: int) -> int:
        """What is left of `budget` in a step in which requests with `num_started` tokens start."""
        if not num_started:
            return budget
        return max(0, min(budget, self.max_prompt_tokens) - num_started)

    def _decode_s(self, num_rows: int) -> float:
        """The usual time of a step of this many rows that decode; 0 = not measured yet."""
        return self._decodes.quantile(num_rows, 0.5) if num_rows else 0.0

    def _prompt_tokens_beside(self, num_decoding: int) -> int:
        """Most prompt tokens of a step in which this many rows decode."""
        token_s = self._tokens.quantile(0.5)
        if not self._max_step_s or not token_s:
            return self._max_tokens
        decode_s = self._decode_s(num_decoding)
        spare_s = max(self._max_step_s, MAX_STRETCH * decode_s) - decode_s
        return max(MIN_PROMPT_TOKENS, int(min(spare_s / token_s, self._max_tokens)))
