"""Copies of requests that have ended, for readers that compare another version on them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from loraplex.api.request import GenerateRequest, TokenPrompt
from loraplex.errors import Unavailable
from loraplex.refs import Ref, parse_ref
from loraplex_services.common.limits import MAX_MIRRORED_TOKENS
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import TextDelta

CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class MirroredRequest:
    """One request that succeeded, and its answer."""

    request: GenerateRequest
    """The request that another version needs for a comparable answer. It names no model."""
    prompt_text: str
    token_ids: tuple[int, ...]
    text: str
    digest: str
    """Digest of the version that answered."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the answer, and as many as the request's parameters, which may
        be a grammar or lists of ids, count as."""
        assert isinstance(self.request.prompt, TokenPrompt), "made by Recording"
        num_chars = len(repr(self.request.sampling))
        return len(self.request.prompt.ids) + len(self.token_ids) + num_chars // CHARS_PER_TOKEN


class Mirror:
    """The requests that one reader still has to read; bounded in tokens."""

    def __init__(self, ref: Ref, share: float) -> None:
        """`share` of the requests for the tag `ref`."""
        self.ref = ref
        self.share = share
        self._waiting: asyncio.Queue[MirroredRequest | None] = asyncio.Queue()
        self._num_tokens = 0

    def offer(self, mirrored: MirroredRequest) -> None:
        """Add a request, or leave it out if the reader has too much to read."""
        if self._num_tokens + mirrored.num_tokens <= MAX_MIRRORED_TOKENS:
            self._num_tokens += mirrored.num_tokens
            self._waiting.put_nowait(mirrored)

    def end(self) -> None:
        """End the mirror after the requests that wait."""
        self._waiting.put_nowait(None)

    async def next(self) -> MirroredRequest:
        """The next request, as soon as there is one. Raises: Unavailable if the gateway drains."""
        if (mirrored := await self._waiting.get()) is None:
            raise draining()
        self._num_tokens -= mirrored.num_tokens
        return mirrored


@dataclass(slots=True)
class Recording:
    """The answer of one running request, as it arrives."""

    prepared: PreparedRequest
    mirrors: list[Mirror]
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, delta: TextDelta) -> None:
        """More of the answer. Mutates: token_ids, texts."""
        self.token_ids.extend(delta.token_ids)
        self.texts.append(delta.text)

    def end(self) -> None:
        """Offer the ended request to its mirrors, if one version computed all of it."""
        prepared = self.prepared
        if len(prepared.labels) != 1 or not self.token_ids:
            return
        used = prepared.resolved.sampling
        request = GenerateRequest(
            model="",
            prompt=TokenPrompt(prepared.prompt_ids),
            sampling=replace(
                prepared.call.sampling,
                max_tokens=used.max_tokens,
                seed=used.seed,
                echo=False,
                logprobs=None,
                logprob_token_ids=(),
                prompt_logprobs=None,
            ),
        )
        mirrored = MirroredRequest(
            request,
            prepared.prompt_text(),
            tuple(self.token_ids),
            "".join(self.texts),
            prepared.adapter_set.digests[0],
        )
        for mirror in self.mirrors:
            mirror.offer(mirrored)


class Mirrors:
    """The open mirrors of this gateway, by the tenant that reads them."""

    def __init__(self) -> None:
        self._open: dict[str, list[Mirror]] = {}
        self._has_ended = False

    @contextmanager
    def opened(self, tenant: str, ref: Ref, share: float) -> Iterator[Mirror]:
        """Open a mirror of a share of a tenant's requests for a tag.

        Raises: Unavailable if the gateway drains.
        """
        if self._has_ended:
            raise draining()
        mirror = Mirror(ref, share)
        self._open.setdefault(tenant, []).append(mirror)
        try:
            yield mirror
        finally:
            self._open[tenant].remove(mirror)
            if not self._open[tenant]:
                del self._open[tenant]

    def end(self) -> None:
        """End all mirrors and open no more, because the gateway drains."""
        self._has_ended = True
        for mirrors in self._open.values():
            for mirror in mirrors:
                mirror.end()

    def recording(self, prepared: PreparedRequest) -> Recording | None:
        """A recording of a request, if some mirror shows it; else None."""
        call = prepared.call
        mirrors = self._open.get(call.tenant)
        is_comparable = (
            len(prepared.target.adapters) == 1
            and not call.adapters
            and not prepared.pooling
            and prepared.resolved.num_choices == 1
            and prepared.resolved.emits_tokens
        )
        if not mirrors or not is_comparable:
            return None
        ref = parse_ref(call.model, call.tenant)
        chosen = [m for m in mirrors if m.ref == ref and random.random() < m.share]
        return Recording(prepared, chosen) if chosen else None


def draining() -> Unavailable:
    """The refusal of a gateway that stops."""
    return Unavailable(
        "this gateway is draining; retry at another one", reason="DRAINING", retry_after_s=1.0
    )
