"""The process that compiles grammars before the engine does.

Grammars are untrusted, and the library that reads them recurses as deeply as they nest. A grammar
is therefore compiled here first, on a stack much smaller than the engine's, with a memory limit,
and in a process that its parent kills when it takes too long. A grammar that passes is safe in the
engine. The memory of the compiled grammar is measured here too, because the engine keeps it while
the request waits and runs. Jobs and answers are JSON.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from loraplex.api.sampling import Grammar
from loraplex.errors import LoraplexError
from loraplex_services.common.limits import GRAMMARS, MAX_COMPILED_GRAMMAR_BYTES
from loraplex_services.common.processes.job_process import limit_memory, read_setup, serve
from loraplex_services.worker.grammars.compiling import (
    bad_grammar,
    compile_grammar,
    in_lark,
    read_vocabulary,
)
from loraplex_services.worker.types.messages import WireError

STACK_BYTES = 2 << 20


class GrammarSetup(msgspec.Struct, frozen=True):
    """The vocabulary against which grammars are matched."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: list[int]


class GrammarVerdict(msgspec.Struct, frozen=True):
    """The result of the check of a grammar."""

    fault: WireError | None = None
    """Why it is refused; None = it is good."""
    lark: str | None = None
    """A good grammar in the notation that the engine reads, if it came in another one."""


def main() -> None:
    """Answer every grammar with a `GrammarVerdict` until stdin closes."""
    limit_memory(GRAMMARS.memory_bytes)
    setup = msgspec.json.decode(read_setup(), type=GrammarSetup)
    vocabulary: LLTokenizer | LoraplexError
    try:
        path = Path(setup.tokenizer_json)
        vocabulary = read_vocabulary(path, setup.vocab_size, setup.eos_ids)
    except LoraplexError as error:
        vocabulary = error
    threading.stack_size(STACK_BYTES)
    thread = ThreadPoolExecutor(1)

    def answer(job: bytes) -> bytes:
        grammar = msgspec.json.decode(job, type=Grammar)
        verdict = thread.submit(_verdict, grammar, vocabulary).result()
        return msgspec.json.encode(verdict)

    serve(answer, GRAMMARS.cpu_s)


def _verdict(grammar: Grammar, vocabulary: LLTokenizer | LoraplexError) -> GrammarVerdict:
    try:
        readable = in_lark(grammar)
    except LoraplexError as error:
        return GrammarVerdict(WireError.of(error))
    fault = _fault(readable, vocabulary)
    if fault is not None:
        return GrammarVerdict(WireError.of(fault))
    return GrammarVerdict(lark=None if readable is grammar else readable.ebnf)


def _fault(grammar: Grammar, vocabulary: LLTokenizer | LoraplexError) -> LoraplexError | None:
    if isinstance(vocabulary, LoraplexError):
        return vocabulary
    before = _heap_bytes()
    try:
        matcher = compile_grammar(grammar, vocabulary)
    except LoraplexError as error:
        return error
    num_bytes = _heap_bytes() - before
    del matcher  # it had to live until its size was known
    if num_bytes > MAX_COMPILED_GRAMMAR_BYTES:
        most = MAX_COMPILED_GRAMMAR_BYTES >> 20
        what = f"takes {num_bytes >> 20} MiB compiled, and at most {most} are allowed"
        return bad_grammar(grammar, f"it {what}: simplify it")
    return None


class _HeapUse(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _heap_bytes() -> int:
    """Bytes that this process has allocated; 0 where the C library is not glibc."""
    measure = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if measure is None:
        return 0
    measure.restype = _HeapUse
    use = measure()
    return int(use.uordblks + use.hblkhd)


if __name__ == "__main__":
    main()
