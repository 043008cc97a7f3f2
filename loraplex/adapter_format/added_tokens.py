"""Finds the tokens that an adapter's tokenizer files add to its base's vocabulary.

Only additions are taken. Every token of the base must be in the adapter's files under the id that
it has there, so that a text means the same ids in the cache, the grammars and the base's rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapter_format.vocabulary import MAX_ADDED_TOKENS
from loraplex.errors import InvalidAdapter

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
TOKENIZER_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, ADDED_TOKENS_FILE)
TEXT_FILES = (*TOKENIZER_FILES, *TEMPLATE_FILES)
"""The files of an adapter that determine how its text is written."""
MAX_TEXT_BYTES = 48 << 20
"""Largest size in bytes of all text files together."""
MAX_TOKEN_CHARS = 1024
MAX_TOKENS_BYTES = 1 << 20
"""Largest size of all added tokens of an adapter together, in UTF-8. The library that tokenizes
needs about a second and 50 MB to look for as many in a text, and no other thread runs meanwhile."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One token, and how the tokenizer looks for it in a text."""

    token_id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


def added_tokens(base_tokenizer: bytes, files: Mapping[str, bytes]) -> tuple[AddedToken, ...]:
    """The tokens that an adapter adds, ordered by id; ids follow the base's last without a gap.

    Args:
        base_tokenizer: content of the base's tokenizer.json.
        files: the adapter's text files by name; of tokenizer.json, tokenizer_config.json and
            added_tokens.json the first that lists tokens counts.

    Raises:
        InvalidAdapter: naming the file and what disagrees with the base.
    """
    base = _vocabulary(_object(base_tokenizer, TOKENIZER_FILE), TOKENIZER_FILE)
    name, listed = _listed(base, files)
    known = set(base.values())
    found = []
    for token in sorted(listed, key=lambda token: token.token_id):
        if base.get(token.token_id) == token.content:
            continue
        if token.token_id in base or token.content in known:
            raise _refused(
                name,
                token.content,
                f"has id {token.token_id}, where the base has another token or another id; "
                "keep the base's tokens and add new ones after them",
            )
        found.append(token)
    _check_run(name, base, found)
    return tuple(found)


def _listed(base: Mapping[int, str], files: Mapping[str, bytes]) -> tuple[str, list[AddedToken]]:
    """The tokens that a file lists as added, and the file; the base's own may be among them."""
    if TOKENIZER_FILE in files:
        whole = _object(files[TOKENIZER_FILE], TOKENIZER_FILE)
        _check_same(base, _vocabulary(whole, TOKENIZER_FILE), whole)
        return TOKENIZER_FILE, _tokens(whole.get("added_tokens") or [], TOKENIZER_FILE)
    if TOKENIZER_CONFIG_FILE in files:
        config = _object(files[TOKENIZER_CONFIG_FILE], TOKENIZER_CONFIG_FILE)
        decoder = config.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            entries = [{"id": key, **_entry(entry)} for key, entry in decoder.items()]
            return TOKENIZER_CONFIG_FILE, _tokens(entries, TOKENIZER_CONFIG_FILE)
    if ADDED_TOKENS_FILE in files:
        by_content = _object(files[ADDED_TOKENS_FILE], ADDED_TOKENS_FILE)
        entries = [{"id": token_id, "content": text} for text, token_id in by_content.items()]
        return ADDED_TOKENS_FILE, _tokens(entries, ADDED_TOKENS_FILE)
    return TOKENIZER_FILE, []


def _check_same(
    base: Mapping[int, str], theirs: Mapping[int, str], whole: Mapping[str, Any]
) -> None:
    """Check that every token of the base is there, and that all others are listed as added."""
    for token_id, content in base.items():
        if theirs.get(token_id) != content:
            raise _refused(
                TOKENIZER_FILE,
                theirs.get(token_id, "missing"),
                f"is at id {token_id}, where the base has {content[:80]!r}; save the tokenizer of "
                "this base with tokens added, or leave the file out",
            )
    added = {token.token_id for token in _tokens(whole.get("added_tokens") or [], TOKENIZER_FILE)}
    for token_id in theirs.keys() - base.keys() - added:
        raise _refused(
            TOKENIZER_FILE,
            theirs[token_id],
            f"(id {token_id}) is new in the vocabulary but not listed in added_tokens; add it with "
            "tokenizer.add_tokens",
        )


def _check_run(name: str, base: Mapping[int, str], found: list[AddedToken]) -> None:
    if len(found) > MAX_ADDED_TOKENS:
        raise _refused(name, len(found), f"adds more than the {MAX_ADDED_TOKENS} tokens served")
    num_bytes = sum(len(token.content.encode(errors="surrogatepass")) for token in found)
    if num_bytes > MAX_TOKENS_BYTES:
        why = f"adds tokens of {num_bytes} bytes; at most {MAX_TOKENS_BYTES} are served"
        raise _refused(name, len(found), why)
    first = max(base, default=-1) + 1
    for index, token in enumerate(found):
        if token.token_id != first + index:
            raise _refused(
                name,
                token.content,
                f"has id {token.token_id}, but {first + index} is next after the base's tokens; "
                "let tokenizer.add_tokens choose the ids",
            )
    if len({token.content for token in found}) < len(found):
        raise _refused(name, "added_tokens", "lists a token twice; list each once")


def _vocabulary(whole: Mapping[str, Any], name: str) -> dict[int, str]:
    """The tokens of a tokenizer.json by id."""
    model = whole.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        found = {_id(token_id, name): str(content) for content, token_id in vocab.items()}
    elif isinstance(vocab, list):
        found = {index: str(_first(entry)) for index, entry in enumerate(vocab)}
    else:
        raise _refused(name, "model.vocab", "is missing; save the tokenizer with transformers")
    found.update((t.token_id, t.content) for t in _tokens(whole.get("added_tokens") or [], name))
    return found


def _tokens(entries: Any, name: str) -> list[AddedToken]:
    if not isinstance(entries, list):
        raise _refused(name, "added_tokens", "must be a list of tokens")
    return [_token(_entry(entry), name) for entry in entries]


def _token(entry: Mapping[str, Any], name: str) -> AddedToken:
    content = entry.get("content")
    if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_CHARS:
        raise _refused(name, content, f"must be a text of 1 to {MAX_TOKEN_CHARS} characters")
    special = entry.get("special") is True
    return AddedToken(
        _id(entry.get("id"), name),
        content,
        special=special,
        single_word=entry.get("single_word") is True,
        lstrip=entry.get("lstrip") is True,
        rstrip=entry.get("rstrip") is True,
        normalized=entry.get("normalized", not special) is True,
    )


def _id(value: Any, name: str) -> int:
    """The id in a key of a config: JSON keys are text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise _refused(name, value, "must be a token id; save the tokenizer with transformers")
    return value


def _entry(entry: Any) -> Mapping[str, Any]:
    return entry if isinstance(entry, dict) else {}


def _first(entry: Any) -> Any:
    return entry[0] if isinstance(entry, list) and entry else ""


def _object(content: bytes, name: str) -> dict[str, Any]:
    try:
        loaded = json.loads(content)
    except (ValueError, RecursionError):
        raise _refused(name, "", "is not JSON; save the tokenizer with transformers") from None
    if not isinstance(loaded, dict):
        raise _refused(name, "", "is not a JSON object; save the tokenizer with transformers")
    return loaded


def _refused(name: str, value: object, why: str) -> InvalidAdapter:
    shown = value[:80] if isinstance(value, str) else value
    return InvalidAdapter.field(name, shown, why)
