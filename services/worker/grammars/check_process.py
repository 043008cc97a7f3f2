"""The process that tries grammars before an engine sees them.

A grammar comes from a stranger, and the library that reads it may recurse as deep as it nests. So
it is compiled here first, on a stack much smaller than the engine's, with a memory limit, and in a
process that its parent kills when it takes too long: what passes is safe there, and what does not
takes nothing with it. Jobs and answers are JSON.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from loraplex.api.sampling import Grammar
from loraplex.errors import LoraplexError
from loraplex_services.common.job_process import limit_memory, read_setup, serve
from loraplex_services.common.limits import GRAMMARS
from loraplex_services.worker.grammars.compiling import compile_grammar, read_vocabulary
from loraplex_services.worker.types.messages import WireError

STACK_BYTES = 2 << 20


class GrammarSetup(msgspec.Struct, frozen=True):
    """What grammars are matched with."""

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
    try:
        compile_grammar(grammar, vocabulary)
    except LoraplexError as error:
        return error
    return None


if __name__ == "__main__":
    main()
