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
    read_vocabulary,
)
from loraplex_services.worker.types.messages import WireError

STACK_BYTES = 2 << 20


class GrammarSetup(msgspec.Struct, frozen=True):
    """The vocabulary against which grammars are matched."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: list[int]


def main() -> None:
    """Answer every grammar until stdin closes: null for a good one, else why it is refused."""
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
        fault = thread.submit(_fault, grammar, vocabulary).result()
        return msgspec.json.encode(None if fault is None else WireError.of(fault))

    serve(answer, GRAMMARS.cpu_s)


def _fault(grammar: Grammar, vocabulary: LLTokenizer | LoraplexError) -> LoraplexError | None:
    if isinstance(vocabulary, LoraplexError):
        return vocabulary
    before = _heap_bytes()
    try:
        matcher = compile_grammar(grammar, vocabulary)
    except LoraplexError as error:
        return error
    num_bytes = _heap_bytes() - before
    del matcher  # it was alive until its size was known
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
