"""Detokenizes incrementally and holds back incomplete characters.

Most tokenizers give every token a fixed run of bytes: byte-level BPE through GPT-2's printable
alphabet, SentencePiece-style ones through `▁` and `<0xNN>` fallback tokens. For these `TokenBytes`
knows the bytes of an id and one incremental UTF-8 decoder joins them, so that the text depends only
on the ids, not on how they were split over steps. Other decoders (WordPiece, CTC, ...) are asked
for the text of a short window before and after each token.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING_TOKENS = 16
"""A character that is incomplete after this many ids is broken text."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """Turns the ids of one sequence into text, in order."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this id; may be empty."""

    def flush(self) -> str:
        """The text that was held back; an incomplete character becomes U+FFFD."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet (an added one) is its own UTF-8."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


class _Steps:
    """A decoder of tokenizer.json, flattened to what happens to one token."""

    def __init__(self, decoder: dict[str, Any]) -> None:
        self.is_byte_level = False
        self.has_byte_fallback = False
        self.replacements: list[tuple[str, str]] = []
        self.first_drops = ""
        """The character that is dropped from the first token of a text."""
        self.strip_start: tuple[str, int] | None = None
        """(character, most times) taken from the start of a whole text."""
        self.is_per_token = self._read(decoder)

    def _read(self, decoder: dict[str, Any]) -> bool:
        """False if a step looks at more than one token."""
        kind = decoder.get("type")
        if kind == "Sequence":
            return all(self._read(step) for step in decoder["decoders"])
        if kind == "ByteLevel":
            self.is_byte_level = True
        elif kind == "ByteFallback":
            self.has_byte_fallback = True
        elif kind == "Metaspace":
            self.replacements.append((decoder["replacement"], " "))
            if decoder.get("prepend_scheme", "always") != "never":
                self.first_drops = decoder["replacement"]
        elif kind == "Replace" and "String" in decoder["pattern"]:
            self.replacements.append((decoder["pattern"]["String"], decoder["content"]))
        elif kind == "Strip" and not decoder["stop"]:
            self.strip_start = (decoder["content"], decoder["start"])
        elif kind != "Fuse":
            return False
        return not (self.is_byte_level and (self.replacements or self.has_byte_fallback))

    def bytes_of(self, token: str, is_first: bool) -> bytes:
        """Bytes that a token adds to a text."""
        if self.is_byte_level:
            return _byte_level(token)
        if self.has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            data = bytes([int(match[1], 16)])
        else:
            if is_first and self.first_drops:
                token = token.replace(self.first_drops, "")
            for old, new in self.replacements:
                token = token.replace(old, new)
            data = token.encode()
        return self._stripped(data) if is_first else data

    def _stripped(self, data: bytes) -> bytes:
        if self.strip_start is not None:
            char, count = self.strip_start
            while count and data.startswith(char.encode()):
                data, count = data[len(char.encode()) :], count - 1
        return data


class _Texts(dict[int, str]):
    """How each token is shown by itself, computed when it is first needed. Answers with logprobs
    look thousands of tokens up, and a look-up of a known one calls no Python function."""

    def __init__(self, tokens: TokenBytes) -> None:
        super().__init__()
        self._tokens = tokens

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = _shown(self._tokens.of(token_id))
        return text


def _shown(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenBytes:
    """Bytes and strings of single tokens of one tokenizer; shared by all its sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder else b'{"type": "none"}'
        self._steps = _Steps(json.loads(state))
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = {token.content: i for i, token in added.items()}
        self._cache: dict[int, bytes] = {}
        self.texts: dict[int, str] = _Texts(self)
        r"""How a token is shown by itself: its text, or `bytes:\xNN` if it is not UTF-8."""

    @property
    def is_exact(self) -> bool:
        """True if each token has bytes of its own."""
        return self._steps.is_per_token

    def of(self, token_id: int, is_first: bool = False) -> bytes:
        """Bytes that an id adds to a text; b"" for ids without text."""
        if is_first:
            return self._compute(token_id, True)
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._compute(token_id, False)
        return known

    def name_of(self, token_id: int) -> str:
        """The id as the vocabulary writes it; "" for ids without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def added_id(self, text: str) -> int | None:
        """The id of an added token, special or not, by its text."""
        return self._added_ids.get(text)

    def counts_as_first(self, token_id: int) -> bool:
        """True if the id ends the start of a text although it added nothing to it."""
        if self._steps.first_drops:
            return self._tokenizer.id_to_token(token_id) is not None
        return bool(self.of(token_id))

    def _compute(self, token_id: int, is_first: bool) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_exact:
            return self._steps.bytes_of(token, is_first)
        if token_id in self.special_ids:
            return token.encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def detokenizer(self, *, skip_special: bool = True, is_start: bool = False) -> Detokenizer:
        """A detokenizer for one sequence.

        Args:
            skip_special: special tokens add no text.
            is_start: the sequence begins a text; False if it continues a prompt, so that its
                first space stays.
        """
        if self.is_exact:
            return _ByteDetokenizer(self, skip_special, is_start)
        return _WindowDetokenizer(self._tokenizer, skip_special)


class _ByteDetokenizer:
    """Joins the bytes of tokens; holds back an unfinished character."""

    __slots__ = ("_decode", "_is_first", "_skipped", "_tokens")

    def __init__(self, tokens: TokenBytes, skip_special: bool, is_start: bool) -> None:
        self._tokens = tokens
        self._skipped = tokens.special_ids if skip_special else frozenset()
        self._is_first = is_start
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        data = self._tokens.of(token_id, self._is_first)
        if self._is_first:
            self._is_first = not data and not self._tokens.counts_as_first(token_id)
        return self._decode(data)

    def flush(self) -> str:
        return self._decode(b"", True)


class _WindowDetokenizer:
    """Asks the library for the text of a window with and without the newest tokens."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._settled: list[int] = []
        """Ids whose text is out, kept as left context."""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        is_open = not text or text.endswith(REPLACEMENT)
        if is_open and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        return self._settle(text)

    def flush(self) -> str:
        return self._settle(self._new_text())

    def _new_text(self) -> str:
        before = self._text(self._settled)
        return self._text(self._settled + self._pending)[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _settle(self, text: str) -> str:
        self._settled, self._pending = self._pending, []
        return text


def decode_all(tokens: TokenBytes, ids: tuple[int, ...], *, skip_special: bool) -> str:
    """The text of a complete sequence of ids, such as a prompt."""
    detokenizer = tokens.detokenizer(skip_special=skip_special, is_start=True)
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()
