"""The process that tries grammars before an engine sees them: jobs on stdin, verdicts on stdout.

A grammar comes from a stranger, and the library that reads it may recurse as deep as it nests. So
it is compiled here first, on a stack much smaller than the engine's, with a memory limit, and in a
process that its parent kills when it takes too long: what passes is safe there, and what does not
takes nothing with it. Frames both ways are lines of JSON.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from loraplex.api.sampling import Grammar
from loraplex.errors import LoraplexError
from loraplex_services.worker.grammars.compiling import compile_grammar, read_vocabulary
from loraplex_services.worker.types.messages import WireError

MAX_MEMORY_BYTES = 4 << 30
STACK_BYTES = 2 << 20


class Setup(msgspec.Struct, frozen=True):
    """The first line: what grammars are matched with."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: list[int]


def main() -> None:
    """Answer every line until stdin closes: null for a good grammar, else why it is refused."""
    for limit, value in ((resource.RLIMIT_AS, MAX_MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS knows no limit on address space
            resource.setrlimit(limit, (value, value))
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    vocabulary: LLTokenizer | LoraplexError
    try:
        path = Path(setup.tokenizer_json)
        vocabulary = read_vocabulary(path, setup.vocab_size, setup.eos_ids)
    except LoraplexError as error:
        vocabulary = error
    _answer(vocabulary if isinstance(vocabulary, LoraplexError) else None)
    threading.stack_size(STACK_BYTES)
    thread = ThreadPoolExecutor(1)
    for line in sys.stdin.buffer:
        grammar = msgspec.json.decode(line, type=Grammar)
        _answer(thread.submit(_fault, grammar, vocabulary).result())


def _fault(grammar: Grammar, vocabulary: LLTokenizer | LoraplexError) -> LoraplexError | None:
    if isinstance(vocabulary, LoraplexError):
        return vocabulary
    try:
        compile_grammar(grammar, vocabulary)
    except LoraplexError as error:
        return error
    return None


def _answer(error: LoraplexError | None) -> None:
    verdict = None if error is None else WireError.of(error)
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
