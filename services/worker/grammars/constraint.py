"""The state of one request in its grammar, computed outside the engine's loop.

The state is a function of the output alone. A preempted request keeps it, and a request from
another worker recomputes it from the tokens that were already emitted.

Matchers use the base's tokens. A token that only an adapter has is spelled with base tokens of the
same bytes, and is allowed where these are allowed one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from llguidance import LLMatcher, LLTokenizer

from loraplex.api.sampling import Grammar, GrammarTokens
from loraplex.errors import InvalidRequest
from loraplex_services.worker.grammars.compiling import bad_grammar

Submit = Callable[[Callable[[], bytes]], "Future[bytes]"]
"""Starts the computation of a mask in another thread."""
QUICK_MASK_S = 0.001
"""Longest time in seconds of a mask that may be computed while a step runs. Steps on GPUs take
several times as long, so the mask is there before the step chooses its tokens."""


class AdapterMatcher:
    """A matcher under an adapter's own tokens."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: LLTokenizer,
        own: GrammarTokens,
        base_eos_ids: Sequence[int],
    ) -> None:
        """`matcher` belongs to the follower from here on."""
        self._matcher = matcher
        self._spelled = _spelled(own, vocabulary)
        self._own_eos_ids = frozenset(own.eos_ids)
        self._base_eos_ids = frozenset(base_eos_ids)
        self._has_ended = False

    @property
    def is_finished(self) -> bool:
        """True if only the end may follow, or the end has occurred."""
        return self._has_ended or self._matcher.is_stopped()

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Follow output tokens; False if they leave the grammar, or it is too costly."""
        for token_id in token_ids:
            if self._has_ended:
                return False
            if token_id in self._own_eos_ids:
                self._has_ended = self._matcher.is_accepting()
                if not self._has_ended:
                    return False
            elif not self._matcher.consume_tokens(self._spelled.get(token_id, [token_id])):
                return False
        return True

    def bitmask(self) -> bytes:
        """The tokens that may come next, one bit each."""
        mask = self._matcher.compute_bitmask()
        if not self._spelled and not self._own_eos_ids:
            return mask
        bits = bytearray(mask)
        if self._own_eos_ids:
            ends = self._matcher.is_accepting()
            for token_id in self._base_eos_ids | self._own_eos_ids:
                _set(bits, token_id, ends and token_id in self._own_eos_ids)
        for token_id, base_ids in self._spelled.items():
            may_begin = mask[base_ids[0] // 8] >> base_ids[0] % 8 & 1
            if may_begin and self._matcher.validate_tokens(base_ids) == len(base_ids):
                _set(bits, token_id, True)
        return bytes(bits)


class GrammarConstraint:
    """Implements `request.Constraint`. Masks are computed where `submit` runs them, while steps
    run."""

    def __init__(self, grammar: Grammar, follower: AdapterMatcher, submit: Submit) -> None:
        """`follower` belongs to the constraint from here on."""
        self._grammar = grammar
        self._follower = follower
        self._submit = submit
        self.is_finished = False
        """True if only the end may follow, or the end has occurred."""
        self.mask_s = 0.0
        """Duration of the last mask in seconds."""
        self.mask: Future[bytes] = submit(self._compute_mask)

    @property
    def is_ready(self) -> bool:
        """True if `bitmask` would not wait."""
        return self.mask.done()

    @property
    def is_quick(self) -> bool:
        """True if the last mask took less than `QUICK_MASK_S`."""
        return self.mask_s < QUICK_MASK_S

    def bitmask(self) -> bytes:
        """The tokens that may come next, one bit each; none if the grammar has no continuation."""
        return self.mask.result()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow new output tokens and begin to compute what may come after them.

        Raises:
            InvalidRequest: the tokens leave the grammar, or it is too costly to follow.
        """
        self.mask.result()
        if not self._follower.consume(token_ids):
            reason = "it cannot be followed further with this output: simplify it"
            raise bad_grammar(self._grammar, reason)
        self.is_finished = self._follower.is_finished
        if not self.is_finished:  # from here on the matcher belongs to the thread until it is done
            self.mask = self._submit(self._compute_mask)

    def _compute_mask(self) -> bytes:
        begin_s = time.monotonic()
        mask = self._follower.bitmask()
        self.mask_s = time.monotonic() - begin_s
        return mask


def resume(follower: AdapterMatcher, grammar: Grammar, output_ids: Sequence[int]) -> None:
    """Let `follower`, which is at the start, follow the output so far.

    Raises:
        InvalidRequest: the output is not a prefix of the grammar, or is already complete.
    """
    if output_ids and not (follower.consume(output_ids) and not follower.is_finished):
        raise InvalidRequest.field(
            "output_ids",
            f"{len(output_ids)} tokens",
            f"they must begin what the {grammar.form} allows, and leave something to generate",
        )


def _spelled(own: GrammarTokens, vocabulary: LLTokenizer) -> Mapping[int, list[int]]:
    """Added tokens in tokens of the base; those that it cannot write are left out."""
    spelled = {}
    for token_id, text in own.added:
        base_ids = vocabulary.greedy_tokenize(text)
        if base_ids and vocabulary.decode_bytes(base_ids) == text.encode():
            spelled[token_id] = base_ids
    return spelled


def _set(bits: bytearray, token_id: int, value: bool) -> None:
    index, bit = divmod(token_id, 8)
    if index >= len(bits):
        bits.extend(bytes(index + 1 - len(bits)))
    bits[index] = bits[index] | 1 << bit if value else bits[index] & ~(1 << bit)
