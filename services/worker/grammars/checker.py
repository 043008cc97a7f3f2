"""Checks grammars in shared processes and remembers the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.api.sampling import Grammar
from loraplex.errors import LoraplexError
from loraplex_services.common.limits import GRAMMARS, PoolLimits
from loraplex_services.common.processes.process_pool import JobFailed, ProcessPool
from loraplex_services.worker.grammars.check_process import GrammarSetup, GrammarVerdict
from loraplex_services.worker.grammars.compiling import bad_grammar, check_size

_MODULE = "loraplex_services.worker.grammars.check_process"


class GrammarChecker:
    """Decides whether an engine may be given a grammar. Its processes start with the first
    grammars."""

    def __init__(self, tokenizer_json: Path, limits: PoolLimits = GRAMMARS) -> None:
        self._tokenizer_json = tokenizer_json
        self._limits = limits
        self._pool: ProcessPool | None = None

    async def check(
        self, grammar: Grammar, vocab_size: int, eos_ids: Sequence[int], tenant: str = ""
    ) -> Grammar:
        """Check a grammar for a model, which is the same in all calls. Returns the grammar in the
        notation that the engine reads.

        Cancel it when no caller waits for the answer any more, which frees the process immediately.

        Args:
            tenant: whose request it is; tenants get the processes in rotation.

        Raises:
            InvalidRequest: naming the grammar and the reason.
            Unsupported: this base's tokenizer cannot constrain output.
            ResourceExhausted: the tenant has too many grammars waiting.
        """
        check_size(grammar)
        if self._pool is None:
            setup = GrammarSetup(str(self._tokenizer_json), vocab_size, list(eos_ids))
            self._pool = ProcessPool(_MODULE, self._limits, msgspec.json.encode(setup))
        try:
            answer = await self._pool.ask(tenant, msgspec.json.encode(grammar), grammar)
        except JobFailed as failed:
            raise _refusal(grammar, failed) from None
        verdict = msgspec.json.decode(answer, type=GrammarVerdict)
        if verdict.fault is not None:
            raise verdict.fault.to_error()
        return grammar if verdict.lark is None else Grammar(ebnf=verdict.lark)

    async def close(self) -> None:
        """End the processes and wait until they are gone."""
        if self._pool is not None:
            await self._pool.close()


def _refusal(grammar: Grammar, failed: JobFailed) -> LoraplexError:
    if failed.is_late:
        return bad_grammar(grammar, "it takes too long to compile: simplify it")
    return bad_grammar(grammar, "it needs too much memory or nests too deeply: simplify it")
