"""Checks grammars in a process of their own, one at a time, and remembers the results."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.api.sampling import Grammar
from loraplex.errors import LoraplexError
from loraplex_services.common.piped_process import ask_line, start_module
from loraplex_services.worker.grammars.check_process import Setup
from loraplex_services.worker.grammars.compiling import bad_grammar, check_size
from loraplex_services.worker.types.messages import WireError

MAX_VERDICTS = 1024
START_TIMEOUT_S = 60.0
"""For Python and a large vocabulary."""
CHECK_TIMEOUT_S = 5.0
"""For one grammar."""


class GrammarChecker:
    """Says whether an engine may be given a grammar. The process starts with the first one."""

    def __init__(self, tokenizer_json: Path) -> None:
        self._tokenizer_json = tokenizer_json
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()
        self._verdicts: OrderedDict[Grammar, WireError | None] = OrderedDict()

    async def check(self, grammar: Grammar, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Return when the grammar is good for a model, which is always the same one.

        Raises:
            InvalidRequest: naming the grammar and the reason.
            Unsupported: this base's tokenizer cannot constrain output.
        """
        check_size(grammar)
        setup = Setup(str(self._tokenizer_json), vocab_size, list(eos_ids))
        async with self._one_at_a_time:
            if grammar not in self._verdicts:
                self._verdicts[grammar] = await self._judge(grammar, setup)
            self._verdicts.move_to_end(grammar)
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
            verdict = self._verdicts[grammar]
        if verdict is not None:
            raise verdict.to_error()

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        process = self._process
        self._kill()
        if process is not None:
            await process.communicate()

    def _kill(self) -> None:
        """End the process at once; another starts when it is needed."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def _judge(self, grammar: Grammar, setup: Setup) -> WireError | None:
        """Raises LoraplexError for what is no verdict: too late, or no process can be had."""
        process = await self._running(setup)
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                answer = await ask_line(process, msgspec.json.encode(grammar))
                return msgspec.json.decode(answer, type=WireError | None)
        except TimeoutError:
            self._kill()
            late = f"it takes longer than {CHECK_TIMEOUT_S:g} s to compile: simplify it"
            raise bad_grammar(grammar, late) from None  # on an idle machine it may pass
        except (EOFError, OSError):
            self._kill()
            deep = "it needs too much memory or nests too deeply: simplify it"
            return WireError.of(bad_grammar(grammar, deep))
        except BaseException:
            self._kill()
            raise

    async def _running(self, setup: Setup) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await start_module("loraplex_services.worker.grammars.check_process")
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await ask_line(self._process, msgspec.json.encode(setup))
            except (TimeoutError, EOFError, OSError) as error:
                self._kill()
                raise LoraplexError(
                    "no process to check grammars could be started", reason="GRAMMAR_FAILED"
                ) from error
            except BaseException:
                self._kill()
                raise
        return self._process
