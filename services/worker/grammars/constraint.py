"""One request's place in its grammar, kept beside the engine's loop.

A place is a pure function of the output: a request that was preempted keeps it, one that comes
from another worker finds it again by following the tokens already emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future

from llguidance import LLMatcher

from loraplex.errors import InvalidRequest
from services.worker.grammars.compiling import bad_grammar
from services.worker.request import Grammar


class GrammarConstraint:
    """Implements `request.Constraint`. Masks are computed on `executor` while steps run."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, executor: Executor) -> None:
        """`matcher` is the constraint's own from here on."""
        self._grammar = grammar
        self._matcher = matcher
        self._executor = executor
        self.is_finished = False
        """True when nothing but the end may follow, or the end has been there."""
        self.mask: Future[bytes] = executor.submit(matcher.compute_bitmask)

    @property
    def is_ready(self) -> bool:
        """True when `bitmask` would not wait."""
        return self.mask.done()

    def bitmask(self) -> bytes:
        """The tokens that may come next, one bit each; none where the grammar has no way on."""
        return self.mask.result()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow new output tokens and begin to compute what may come after them.

        Raises:
            InvalidRequest: the tokens leave the grammar, or it is too costly to follow.
        """
        self.mask.result()
        if not self._matcher.consume_tokens(list(token_ids)):
            reason = "it cannot be followed further with this output: simplify it"
            raise bad_grammar(self._grammar, reason)
        self.is_finished = self._matcher.is_stopped()
        if not self.is_finished:  # from here on the matcher belongs to the thread until it is done
            self.mask = self._executor.submit(self._matcher.compute_bitmask)


def resumed(matcher: LLMatcher, grammar: Grammar, output_ids: Sequence[int]) -> LLMatcher:
    """A copy of `matcher`, which is at the start, that has followed `output_ids`.

    Raises:
        InvalidRequest: the output is not a beginning of the grammar, or is complete already.
    """
    copy = matcher.deep_copy()
    if output_ids and not (copy.consume_tokens(list(output_ids)) and not copy.is_stopped()):
        raise InvalidRequest.field(
            "output_ids",
            f"{len(output_ids)} tokens",
            f"they must begin what the {grammar.form} allows, and leave something to generate",
        )
    return copy
