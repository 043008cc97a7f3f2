"""Logprobs in the formats of completions and chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.api.output import TokenLogprob
from loraplex_services.gateway.request import TextDelta
from loraplex_services.gateway.text.detokenize import TokenBytes, token_text

LEAST_LOGPROB = -9999.0
"""OpenAI's replacement for -Infinity, which JSON lacks."""


def completion_logprobs(
    tokens: TokenBytes, entries: Sequence[TokenLogprob], offsets: Sequence[int]
) -> dict[str, Any]:
    """The four parallel lists of completions, an entry per generated token.

    `offsets` are the characters of the choice's text before each token.
    """
    return {
        "tokens": [token_text(tokens, entry.token_id)[0] for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(tokens, entry) for entry in entries],
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    tokens: TokenBytes,
    prompt_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    *,
    skip_special: bool,
) -> dict[str, Any]:
    """The same lists for an echoed prompt, whose first token has no logprob."""
    lists: dict[str, Any] = {
        "tokens": [token_text(tokens, token_id)[0] for token_id in prompt_ids],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    detokenizer = tokens.detokenizer(skip_special=skip_special, is_start=True)
    num_chars = 0
    padded = [*entries, *[None] * (len(prompt_ids) - len(entries))]
    for token_id, entry in zip(prompt_ids, padded, strict=True):
        lists["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        lists["top_logprobs"].append(None if entry is None else _top(tokens, entry))
        lists["text_offset"].append(num_chars)
        num_chars += len(detokenizer.push(token_id))
    return lists


def chat_logprobs(tokens: TokenBytes, text_delta: TextDelta, num_top: int) -> dict[str, Any]:
    """`content` with token, logprob, bytes and the most likely alternatives."""
    content = []
    for entry in text_delta.logprobs:
        shown = _chat_token(tokens, entry.token_id, entry.logprob)
        shown["top_logprobs"] = [_chat_token(tokens, i, lp) for i, lp in entry.top[:num_top]]
        content.append(shown)
    return {"content": content, "refusal": None}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two sets of parallel lists, one after the other."""
    return {name: [*first[name], *second[name]] for name in first}


def _chat_token(tokens: TokenBytes, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = token_text(tokens, token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _top(tokens: TokenBytes, entry: TokenLogprob) -> dict[str, float]:
    """Best first, always including the token itself; of equal texts the most likely one counts."""
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        top.setdefault(token_text(tokens, token_id)[0], _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)  # in this order, which also replaces NaN
