"""The process that reads an adapter's tokenizer files: one job on stdin, its answer on stdout.

The files are untrusted and may have tens of megabytes. Parsing them in this process keeps the
gateway's event loop free and bounds the memory. Nothing in them is executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import resource
import sys
from collections.abc import Mapping

from loraplex.adapter_format.added_tokens import AddedToken, added_tokens
from loraplex.errors import InvalidAdapter
from loraplex_services.common.piped_process import start_module

MAX_MEMORY_BYTES = 3 << 30
TIMEOUT_S = 30.0


async def read_added_tokens(
    base_tokenizer: bytes, files: Mapping[str, bytes]
) -> tuple[AddedToken, ...] | str:
    """`added_tokens` in a process of its own; a text says why the files cannot be used.

    Raises: OSError, TimeoutError, EOFError if the process could not be run to its end.
    """
    parts = {"": base_tokenizer, **files}
    head = json.dumps({name: len(content) for name, content in parts.items()}).encode()
    process = await start_module("loraplex_services.gateway.text.added_tokens_process")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, _ = await process.communicate(b"\n".join([head, b"".join(parts.values())]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode != 0:
        raise EOFError("the process that reads tokenizer files died")
    answer = json.loads(out)
    if "problem" in answer:
        return str(answer["problem"])
    return tuple(AddedToken(**token) for token in answer["added"])


def main() -> None:
    """Answer one job."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = json.loads(sys.stdin.buffer.readline())
    files = {name: sys.stdin.buffer.read(size) for name, size in sizes.items()}
    try:
        found = added_tokens(files.pop(""), files)
        answer: dict[str, object] = {"added": [dataclasses.asdict(token) for token in found]}
    except InvalidAdapter as error:
        answer = {"problem": error.message}
    except MemoryError:
        answer = {"problem": "the tokenizer files need too much memory to read"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
