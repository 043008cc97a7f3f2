"""Tokenizers of adapters: the base's, with the tokens and chat template that they add.

The files are fetched once by digest, and a bounded number of results is kept. If a tokenizer
contradicts the base's, neither it nor its template is used, and the log says why.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loraplex.adapter_format import File
from loraplex.adapter_format.added_tokens import MAX_TEXT_BYTES, AddedToken
from loraplex.errors import LoraplexError, Unavailable
from loraplex_services.common.chat_template import ChatFormat
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.common.processes.process_pool import JobFailed
from loraplex_services.common.shared_work import SharedWork
from loraplex_services.common.tenant_slots import TenantSlots
from loraplex_services.gateway.request import Target
from loraplex_services.gateway.text.text_files_process import TextFilesReader
from loraplex_services.gateway.text.tokenizer import BaseTokenizer, IdsOnly, ServedBase

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 128 << 20
"""Largest size of all kept tokens and templates."""
_ENTRY_BYTES = 1024
"""Approximate size of what is kept for an adapter, without its texts."""
_MAX_READERS = 2
"""Adapters whose files are in memory at one time."""
PAUSE_FACTOR = 20.0
"""After the addition of tokens, which the event loop has to wait for, the next one of the tenant
waits this many times as long as it took."""
_MAX_TENANTS = 1024

ReadFiles = Callable[[str, Sequence[File]], Awaitable[dict[str, bytes]]]
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tokenizer."""

    tokenizer: BaseTokenizer
    shared: Key = ()
    """Where the vocabulary is kept that it has in common with others."""


class AdapterText:
    """The tokenizer for a target, built on first use."""

    def __init__(self, read_files: ReadFiles, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        """`read_files` gives the files of a version, by its label, checked against their sha256."""
        self._read_files = read_files
        self._kept: LruCache[Key, _Kept] = LruCache(max_kept_bytes)
        self._being_made: SharedWork[Key, BaseTokenizer] = SharedWork()
        self._slots = TenantSlots(_MAX_READERS)
        self._additions = TenantSlots(_MAX_TENANTS, max_held=1)
        self._reader = TextFilesReader()

    async def close(self) -> None:
        """End the processes."""
        await self._reader.close()

    async def tokenizer(
        self, served: ServedBase, target: Target, tenant: str = ""
    ) -> BaseTokenizer | IdsOnly:
        """Returns the base's for bases, for several adapters, and for adapters without text files.

        `tenant` asks for it: tenants have their adapters' files read in rotation.

        Raises: Unavailable with reason TOKENIZER_UNAVAILABLE if files could not be fetched.
        """
        base = served.tokenizer
        if len(target.adapters) != 1 or not isinstance(base, BaseTokenizer):
            return base
        (adapter,) = target.adapters
        files = [f for f in adapter.text_files if base.sha256.get(f.path) != f.sha256]
        if not files:
            return base
        key: Key = (_key(served), *((f.path, f.sha256) for f in files))
        if (kept := self._kept.get(key)) is not None:
            self._kept.get(kept.shared)  # What it shares outlasts it.
            return kept.tokenizer
        return await self._being_made.wait(
            key, lambda: self._make(key, served, base, adapter.label, files, tenant)
        )

    async def _make(
        self,
        key: Key,
        served: ServedBase,
        base: BaseTokenizer,
        label: str,
        files: list[File],
        tenant: str,
    ) -> BaseTokenizer:
        if sum(file.size for file in files) > MAX_TEXT_BYTES:
            why = f"its text files have more than {MAX_TEXT_BYTES} bytes"
            return self._left_aside(key, base, label, why)
        try:
            # A tenant has one adapter's files read at a time, so that others need not wait.
            async with self._slots.held(tenant, "tokenizer files"):
                contents = await self._read_files(label, files)
                found = await self._reader.read(tenant, base.source, contents)
        except (JobFailed, LoraplexError, OSError) as error:
            why = error.message if isinstance(error, LoraplexError) else type(error).__name__
            raise Unavailable(
                f"the tokenizer files of {label} cannot be read ({why}); try again",
                reason="TOKENIZER_UNAVAILABLE",
                retry_after_s=1.0,
            ) from error
        if isinstance(found, str):
            return self._left_aside(key, base, label, found)
        if found.chat_problem:
            _warn(label, f"its chat template cannot be read: {found.chat_problem}")
        try:
            made = await self._with_tokens(served, base, found.added, tenant)
        except ValueError as error:
            return self._left_aside(key, base, label, str(error))
        if found.chat is not None:
            made = made.with_chat(found.chat)
        shared = (_key(served), found.added) if found.added else ()
        num_bytes = _num_bytes(found.chat) if found.chat else 0
        self._kept.put(key, _Kept(made, shared), _ENTRY_BYTES + num_bytes)
        return made

    def _left_aside(self, key: Key, base: BaseTokenizer, label: str, why: str) -> BaseTokenizer:
        """Use the base's tokenizer, because the adapter's files cannot be used."""
        _warn(label, why)
        self._kept.put(key, _Kept(base), _ENTRY_BYTES)
        return base

    async def _with_tokens(
        self, served: ServedBase, base: BaseTokenizer, added: tuple[AddedToken, ...], tenant: str
    ) -> BaseTokenizer:
        """Adapters with the same additions share one vocabulary."""
        if not added:
            return base
        key: Key = (_key(served), added)
        if (kept := self._kept.get(key)) is not None:
            return kept.tokenizer
        await self._additions.take(tenant, "tokenizers with new tokens")
        begin_s = time.thread_time()
        try:
            if (kept := self._kept.get(key)) is None:  # another task may have made it
                made = base.with_tokens(added)
                kept = _Kept(made)
                self._kept.put(key, kept, made.num_own_bytes)
        finally:
            pause_s = (time.thread_time() - begin_s) * PAUSE_FACTOR
            asyncio.get_running_loop().call_later(pause_s, self._additions.give, tenant)
        return kept.tokenizer


def _key(served: ServedBase) -> tuple[str, str]:
    return served.model.base_id, served.model.tokenizer_digest


def _num_bytes(chat: ChatFormat) -> int:
    return sum(map(sys.getsizeof, (chat.template, *chat.special_tokens.values())))


def _warn(label: str, why: str) -> None:
    logger.warning("adapter uses the base's tokenizer", extra={"adapter": label, "why": why})
