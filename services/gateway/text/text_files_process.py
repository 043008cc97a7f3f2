"""The process that reads an adapter's tokenizer and template files.

The files are untrusted and may have tens of megabytes, and parsed JSON takes twenty times as much.
Parsing them in this process keeps the gateway's event loop free and bounds the memory. Nothing in
them is executed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.adapter_format.added_tokens import TOKENIZER_FILES as TOKENIZER_NAMES
from loraplex.adapter_format.added_tokens import AddedToken, added_tokens
from loraplex.errors import InvalidAdapter
from loraplex_services.common.chat_template import ChatFormat, chat_format
from loraplex_services.common.limits import TOKENIZER_FILES
from loraplex_services.common.processes.job_process import limit_memory, read_setup, serve
from loraplex_services.common.processes.process_pool import ProcessPool

_MODULE = "loraplex_services.gateway.text.text_files_process"


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The additions of an adapter's files to its base."""

    added: tuple[AddedToken, ...] = ()
    chat: ChatFormat | None = None
    chat_problem: str = ""
    """Why its chat template cannot be read."""


class TextFilesReader:
    """Reads files in processes of their own, one adapter at a time."""

    def __init__(self) -> None:
        self._pool = ProcessPool(_MODULE, TOKENIZER_FILES)

    async def read(
        self, tenant: str, base_tokenizer: bytes, files: Mapping[str, bytes]
    ) -> TextFiles | str:
        """The content of the files; a text says why they cannot be used.

        Args:
            tenant: who asks; tenants get the process in rotation.
            base_tokenizer: content of the base's tokenizer.json.

        Raises: JobFailed, LoraplexError if the process could not be run to its end.
        """
        if files.keys() == {"chat_template.jinja"}:
            return TextFiles((), *_chat_of(files))  # nothing to parse
        base = base_tokenizer if files.keys() & set(TOKENIZER_NAMES) else b""
        parts = {"": base, **files}
        head = json.dumps({name: len(content) for name, content in parts.items()}).encode()
        job = b"\n".join([head, b"".join(parts.values())])
        answer = json.loads(await self._pool.ask(tenant, job))
        if "problem" in answer:
            return str(answer["problem"])
        added = tuple(AddedToken(**token) for token in answer["added"])
        chat = ChatFormat(**answer["chat"]) if answer["chat"] else None
        return TextFiles(added, chat, answer["chat_problem"])

    async def close(self) -> None:
        """End the process."""
        await self._pool.close()


def _answer(job: bytes) -> bytes:
    try:
        return json.dumps(_read(job)).encode()
    except InvalidAdapter as error:
        return json.dumps({"problem": error.message}).encode()
    except MemoryError:
        return json.dumps({"problem": "the files need too much memory to read"}).encode()


def _read(job: bytes) -> dict[str, object]:
    head, _, content = job.partition(b"\n")
    files, begin = {}, 0
    for name, size in json.loads(head).items():
        files[name] = content[begin : begin + size]
        begin += size
    base = files.pop("")
    added = added_tokens(base, files) if base else ()
    chat, problem = _chat_of(files)
    return {
        "added": [dataclasses.asdict(token) for token in added],
        "chat": dataclasses.asdict(chat) if chat else None,
        "chat_problem": problem,
    }


def _chat_of(files: Mapping[str, bytes]) -> tuple[ChatFormat | None, str]:
    """The chat template, and why it cannot be read."""
    try:
        return chat_format(files), ""
    except (ValueError, RecursionError, AttributeError) as error:
        return None, type(error).__name__


def main() -> None:
    """Serve jobs until stdin closes."""
    limit_memory(TOKENIZER_FILES.memory_bytes)
    read_setup()
    serve(_answer, TOKENIZER_FILES.cpu_s)


if __name__ == "__main__":
    main()
