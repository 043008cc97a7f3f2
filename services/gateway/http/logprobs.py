"""Logprobs in the formats of completions and chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from loraplex.api.output import PackedLogprobs, TokenLogprob
from loraplex_services.gateway.pipeline.prepared import PreparedRequest
from loraplex_services.gateway.request import TextDelta
from loraplex_services.gateway.text.detokenize import TokenBytes

LEAST_LOGPROB = -9999.0
"""OpenAI's replacement for -Infinity, which JSON lacks."""


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Token(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class LogprobEntry(Token):
    top_logprobs: list[Token]


class ChatLogprobs(TypedDict):
    content: list[LogprobEntry]
    refusal: NotRequired[None]


class _Ids(dict[int, str]):
    """Tokens shown by their ids. Keeps none of them."""

    def __missing__(self, token_id: int) -> str:
        return f"token_id:{token_id}"


_IDS = _Ids()


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How one response shows tokens: by their text, or as `token_id:N`."""

    tokens: TokenBytes
    as_ids: bool = False

    @property
    def texts(self) -> Mapping[int, str]:
        """The text of each token."""
        return _IDS if self.as_ids else self.tokens.texts

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return _IDS[token_id].encode() if self.as_ids else self.tokens.of(token_id)


def completion_logprobs(
    names: TokenNames, entries: Iterable[TokenLogprob], offsets: Sequence[int]
) -> CompletionLogprobs:
    """The four parallel lists of completions, an entry per generated token.

    `offsets` are the characters of the choice's text before each token.
    """
    texts = names.texts
    lists: CompletionLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": list(offsets),
    }
    for entry in entries:
        lists["tokens"].append(texts[entry.token_id])
        lists["token_logprobs"].append(finite(entry.logprob))
        lists["top_logprobs"].append(_top(texts, entry))
    return lists


def prompt_logprobs(
    names: TokenNames,
    prompt_ids: Sequence[int],
    packed: PackedLogprobs | None,
    *,
    skip_special: bool,
) -> CompletionLogprobs:
    """Lists for an echoed prompt, whose first token has no logprob."""
    texts = names.texts
    lists: CompletionLogprobs = {
        "tokens": [texts[token_id] for token_id in prompt_ids],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    detokenizer = names.tokens.detokenizer(skip_special=skip_special, is_start=True)
    num_chars = 0
    entries = () if packed is None else packed.entries()
    padded = [*entries, *[None] * (len(prompt_ids) - len(entries))]
    for token_id, entry in zip(prompt_ids, padded, strict=True):
        lists["token_logprobs"].append(None if entry is None else finite(entry.logprob))
        lists["top_logprobs"].append(None if entry is None else _top(texts, entry))
        lists["text_offset"].append(num_chars)
        num_chars += len(detokenizer.push(token_id))
    return lists


def prompt_logprob_maps(
    prepared: PreparedRequest, packed: PackedLogprobs | None
) -> PromptLogprobs | None:
    """vLLM's `prompt_logprobs`: per prompt token an object by token id, the token itself first.

    The first position has none. Returns None unless the caller asked for them.
    """
    if prepared.call.sampling.prompt_logprobs is None:
        return None
    entries = () if packed is None else packed.entries()
    return [None if entry is None else _by_id(prepared.tokens, entry) for entry in entries]


def chat_logprobs(names: TokenNames, text_delta: TextDelta) -> ChatLogprobs:
    """`content` with token, logprob, bytes and the requested alternatives."""
    content: list[LogprobEntry] = [
        {
            **_chat_token(names, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(names, i, logprob) for i, logprob in entry.top],
        }
        for entry in text_delta.logprobs
    ]
    return {"content": content, "refusal": None}


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Two sets of parallel lists, one after the other."""
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def _by_id(tokens: TokenBytes, entry: TokenLogprob) -> dict[str, PromptLogprob]:
    ranks = {entry.token_id: entry.rank}
    ranks |= {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": ranks[token_id],
            "decoded_token": tokens.texts[token_id],
        }
        for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top)
    }


def _chat_token(names: TokenNames, token_id: int, logprob: float) -> Token:
    data = names.bytes_of(token_id)
    return {"token": names.texts[token_id], "logprob": finite(logprob), "bytes": list(data)}


def _top(texts: Mapping[int, str], entry: TokenLogprob) -> dict[str, float]:
    """The alternatives in their order, then the token itself; of equal texts the first one
    counts."""
    top: dict[str, float] = {}
    for token_id, logprob in entry.top:
        if (text := texts[token_id]) not in top:
            top[text] = finite(logprob)
    top.setdefault(texts[entry.token_id], finite(entry.logprob))
    return top


def finite(logprob: float) -> float:
    """A logprob that JSON can represent; NaN has no order, and is replaced as well."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB
