"""The engine's grammars: compiled in threads of their own, once per grammar, while the request
waits. What arrives here has been compiled by the checker within its time limit. Tenants take turns,
and no step waits for a grammar."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from loraplex.api.sampling import Grammar, GrammarTokens
from loraplex.errors import LoraplexError, Unsupported
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.worker.grammars.compiling import compile_grammar, read_vocabulary
from loraplex_services.worker.grammars.constraint import AdapterMatcher, GrammarConstraint, resume
from loraplex_services.worker.grammars.tenant_threads import TenantThreads
from loraplex_services.worker.types.request import Request

logger = logging.getLogger(__name__)

MAX_COMPILED_S = 4.0
"""Total processor time in seconds of the compilations that are kept; the least recently used
grammar is dropped first. A second of compilation takes 50 to 150 MiB, and most grammars take a few
milliseconds."""
MASK_GRACE_S = 0.002
"""How long a step waits for masks begun in the step before: most take microseconds. It does not
wait for a grammar whose last mask took longer, so a hard grammar delays no other request."""
NUM_THREADS = 2
"""Number of threads that compile, and as many that compute masks."""
STACK_BYTES = 16 << 20
"""Stack size in bytes of these threads: many times that with which the grammar was checked."""


class Grammars:
    """Requests whose grammar is being compiled, and constraints of those that run."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Reads the vocabulary now, because later it would stop all threads for a second."""
        self._vocabulary: LLTokenizer | Unsupported
        try:
            self._vocabulary = read_vocabulary(tokenizer_json, vocab_size, eos_ids)
        except Unsupported as error:
            self._vocabulary = error
        self._eos_ids = tuple(eos_ids)
        self._compiled: LruCache[Grammar, LLMatcher] = LruCache(MAX_COMPILED_S)
        self._compiled_lock = threading.Lock()
        self._opening: dict[str, tuple[Request, Future[GrammarConstraint]]] = {}
        self._followed: dict[str, tuple[Request, GrammarConstraint]] = {}
        self._fresh: list[Future[bytes]] = []
        self._compilers = TenantThreads(NUM_THREADS, "compile", STACK_BYTES)
        self._maskers = TenantThreads(NUM_THREADS, "masks", STACK_BYTES)

    @property
    def num_opening(self) -> int:
        """Number of requests that wait for their grammar."""
        return len(self._opening)

    @property
    def has_held(self) -> bool:
        """True while a request waits for its next mask."""
        return any(request.is_held for request, _ in self._followed.values())

    def open(self, request: Request, grammar: Grammar, own: GrammarTokens) -> None:
        """Begin to compile; `opened` returns the request later. `own`: the adapter's tokens."""
        work = (grammar, own, tuple(request.output_ids), request.tenant)
        future = self._compilers.submit(request.tenant, self._constraint, *work)
        self._opening[request.request_id] = (request, future)

    def opened(self) -> list[tuple[Request, LoraplexError | None]]:
        """Requests that may be scheduled now, with their constraint, and requests that fail, with
        the error."""
        done = [pair for pair in self._opening.values() if pair[1].done()]
        return [(request, self._settle(request, future)) for request, future in done]

    def advance(self, request: Request, token_ids: Sequence[int]) -> None:
        """Follow a request's new tokens. Raises InvalidRequest."""
        pair = self._followed.get(request.request_id)
        if pair is not None and token_ids:
            constraint = pair[1]
            constraint.advance(token_ids)
            if constraint.mask_s < MASK_GRACE_S:
                self._fresh.append(constraint.mask)

    def hold_back(self) -> None:
        """Mark the requests that the next step must leave out. Mutates them."""
        if self._fresh:
            wait(self._fresh, MASK_GRACE_S)
            self._fresh.clear()
        for request, constraint in self._followed.values():
            request.is_held = not constraint.is_ready

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._followed.pop(request_id, None)
        if (pair := self._opening.pop(request_id, None)) is not None:
            pair[1].cancel()

    def _settle(self, request: Request, future: Future[GrammarConstraint]) -> LoraplexError | None:
        del self._opening[request.request_id]
        try:
            constraint = future.result()
        except LoraplexError as error:
            return error
        except Exception as failure:
            logger.error("a grammar could not be compiled", exc_info=failure)
            return LoraplexError("the grammar could not be compiled", reason="GRAMMAR_FAILED")
        request.constraint = constraint
        self._followed[request.request_id] = (request, constraint)
        return None

    def _constraint(
        self, grammar: Grammar, own: GrammarTokens, output_ids: Sequence[int], tenant: str
    ) -> GrammarConstraint:
        """Runs on a compiling thread."""
        if isinstance(self._vocabulary, Unsupported):
            raise self._vocabulary
        with self._compiled_lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            begin_s = time.thread_time()
            matcher = compile_grammar(grammar, self._vocabulary)
            with self._compiled_lock:
                self._compiled.put(grammar, matcher, time.thread_time() - begin_s)
        follower = AdapterMatcher(matcher.deep_copy(), self._vocabulary, own, self._eos_ids)
        resume(follower, grammar, output_ids)
        submit = functools.partial(self._maskers.submit, tenant)
        constraint = GrammarConstraint(grammar, follower, submit)
        constraint.bitmask()
        return constraint
