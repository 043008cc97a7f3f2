"""The tokenizer and chat template of a base: text to token ids and back.

Built from the tokenizer files that a worker's `GetModel` returns.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models

from loraplex.adapter_format.added_tokens import AddedToken
from loraplex.api.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from loraplex.errors import InvalidRequest
from loraplex_services.common.chat_template import ChatFormat, chat_format, special_tokens
from loraplex_services.common.limits import MAX_CHARS_PER_TOKEN
from loraplex_services.gateway.request import ServedModel, Truncation
from loraplex_services.gateway.text.chat_style import ChatStyle, detected
from loraplex_services.gateway.text.detokenize import TokenBytes
from loraplex_services.gateway.text.final_message import cut_at_end_mark, with_end_mark
from loraplex_services.gateway.text.template_pool import TemplatePool

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
_SLOW_TEXT_CHARS = 32 << 10
"""Longer texts are tokenized in a thread, while the event loop continues."""
_MAX_KEPT_WORDS = 1000
"""Words whose tokens the library keeps in each thread that tokenizes, until the thread ends. By
default it keeps 10,000 words of less than 256 bytes, with 32 bytes for each of their bytes. Some
bases do not split texts into words, so that a short prompt is one word."""
_TOKEN_BYTES = 512
"""Approximate size of an added token, without its text."""
_TEXT_FACTOR = 32
"""How many times the size of their text the library takes to look for added tokens."""


class BaseTokenizer:
    """Tokenizer and chat template of one base."""

    def __init__(self, files: Mapping[str, bytes], pool: TemplatePool) -> None:
        """`files` by name: tokenizer.json, tokenizer_config.json, chat_template.jinja/.json."""
        self._chat = chat_format(files)
        self.info: Mapping[str, str] = special_tokens(files)
        """Special tokens and the chat template, by their names in tokenizer_config.json."""
        if self._chat is not None:
            self.info = {**self.info, "chat_template": self._chat.template}
        self._tokenizer = _load(files["tokenizer.json"])
        self._pool = pool
        self._has_own_chat = False
        """Whether the template is an adapter's."""
        self.source = files["tokenizer.json"]
        """Content of tokenizer.json."""
        self.num_own_bytes = len(self.source)
        """Approximate size, without the parts shared with the tokenizer it was made from."""
        self.sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self.tokens = TokenBytes(self._tokenizer)
        self.added_texts: tuple[tuple[int, str], ...] = ()
        """Ids and texts of the tokens beyond the base's that are not special."""
        self.style = detected(self._chat.template if self._chat else "")

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._chat is not None

    def with_tokens(self, added: Sequence[AddedToken]) -> BaseTokenizer:
        """A tokenizer with more tokens, whose ids follow the last one; both share large data.

        Raises: ValueError if the library numbers them otherwise, as in a base with gaps.
        """
        known = self._tokenizer.get_added_tokens_decoder()
        tokens = known | {token.token_id: _for_library(token) for token in added}
        made = copy.copy(self)
        made._tokenizer = _sharing(self._tokenizer)
        _add(made._tokenizer, dict(sorted(tokens.items())))
        made.added_texts = tuple((t.token_id, t.content) for t in added if not t.special)
        num_text_bytes = sum(len(token.content.encode()) for token in added)
        made.num_own_bytes = _TOKEN_BYTES * len(tokens) + _TEXT_FACTOR * num_text_bytes
        made.tokens = TokenBytes(made._tokenizer)
        return made

    def with_chat(self, chat: ChatFormat) -> BaseTokenizer:
        """A tokenizer with another chat template; special tokens that it does not name are kept."""
        made = copy.copy(self)
        known = self._chat.special_tokens if self._chat else {}
        made._chat = ChatFormat(chat.template, {**known, **chat.special_tokens})
        made._has_own_chat = True
        made.style = detected(chat.template)
        return made

    async def encode(
        self,
        prompt: Prompt,
        base: ServedModel,
        tenant: str = "",
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a prompt in any form, for a request of `tenant`. Special tokens around
        a text survive its truncation.

        Raises: InvalidRequest for an empty prompt, an id outside the vocabulary, or a conversation
        without a template.
        """
        match prompt:
            case TokenPrompt(ids):
                return check_ids(_truncated(ids, truncation), base)
            case TextPrompt(text, add_special, pair):
                field = "prompt"
                check_length(text + pair, base, field)
                has_text = text or pair
                ids = await self._ids(text, add_special, truncation, pair) if has_text else ()
            case ChatPrompt():
                field = "messages"
                text = await self._render(prompt, tenant)
                check_length(text, base, field)
                ids = await self._ids(text, prompt.add_special_tokens, truncation)
        if not ids:
            raise InvalidRequest.field(field, "", "the prompt is empty; send at least one token")
        return ids

    async def words(self, words: Sequence[str]) -> set[tuple[int, ...]]:
        """The tokens of each word, as it begins a text and as it follows a space."""
        if not words:
            return set()
        texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        encodings = await asyncio.to_thread(
            self._tokenizer.encode_batch_fast, texts, add_special_tokens=False
        )
        return {tuple(encoding.ids) for encoding in encodings if encoding.ids}

    async def _render(self, prompt: ChatPrompt, tenant: str) -> str:
        if self._chat is None:
            raise InvalidRequest.field(
                "chat_template",
                "",
                "this base has no chat template; use completions, or serve a base whose tokenizer "
                "has one",
                reason="NO_CHAT_TEMPLATE",
            )
        template = self._chat.template
        messages = prompt.messages
        if "developer" not in template:
            messages = tuple(map(_as_system, messages))
        if prompt.continue_final_message:
            messages = with_end_mark(messages)
        variables: dict[str, Any] = {
            **prompt.template_options,
            "messages": list(messages),
            "add_generation_prompt": prompt.add_generation_prompt,
            "tools": list(prompt.tools) or None,
            "documents": None,
            **self._chat.special_tokens,
        }
        text = await self._pool.render(
            template, variables, tenant=tenant, is_adapters=self._has_own_chat
        )
        return cut_at_end_mark(text) if prompt.continue_final_message else text

    async def _ids(
        self, text: str, add_special_tokens: bool, truncation: Truncation | None, pair: str = ""
    ) -> tuple[int, ...]:
        def encode_long() -> tuple[int, ...]:
            # As in `_truncated_ids`, without the GIL.
            [encoding] = self._tokenizer.encode_batch_fast(
                [(text, pair) if pair else text], add_special_tokens=add_special_tokens
            )
            return tuple(encoding.ids)

        _check_unicode(text + pair)
        if truncation is not None:
            return await asyncio.to_thread(
                self._truncated_ids, text, pair, add_special_tokens, truncation
            )
        if len(text + pair) > _SLOW_TEXT_CHARS:
            return await asyncio.to_thread(encode_long)
        encoding = self._tokenizer.encode(text, pair or None, add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def _truncated_ids(
        self, text: str, pair: str, add_special_tokens: bool, truncation: Truncation
    ) -> tuple[int, ...]:
        # Unlike `encode`, it releases the GIL: the event loop goes on.
        encodings = self._tokenizer.encode_batch_fast(
            [text, pair] if pair else [text], add_special_tokens=False
        )
        is_pair = len(encodings) > 1
        num_special = self._tokenizer.num_special_tokens_to_add(is_pair)
        num_tokens = max(0, truncation.max_tokens - num_special * add_special_tokens)
        direction = "left" if truncation.keeps_end else "right"
        for encoding, length in zip(
            encodings, _cut_lengths([len(each.ids) for each in encodings], num_tokens), strict=True
        ):
            encoding.truncate(length, direction=direction)
        second = encodings[1] if is_pair else None
        encoding = self._tokenizer.post_process(encodings[0], second, add_special_tokens)
        return _truncated(tuple(encoding.ids), truncation)


class IdsOnly:
    """Used for a base without a readable tokenizer: accepts and returns token ids only."""

    def __init__(self) -> None:
        empty = Tokenizer(models.WordLevel({}, unk_token=""))
        empty.decoder = decoders.ByteLevel()
        self.tokens = TokenBytes(empty)
        self.added_texts: tuple[tuple[int, str], ...] = ()
        self.style = ChatStyle()
        self.info: Mapping[str, str] = {}
        self.can_chat = False

    async def encode(
        self,
        prompt: Prompt,
        base: ServedModel,
        tenant: str = "",
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a token prompt. Raises: InvalidRequest for any other form."""
        if isinstance(prompt, TokenPrompt):
            return check_ids(_truncated(prompt.ids, truncation), base)
        raise InvalidRequest.field(
            "prompt", "", "this base has no tokenizer.json; send the prompt as token ids"
        )

    async def words(self, words: Sequence[str]) -> set[tuple[int, ...]]:
        """No tokens of no words. Raises: InvalidRequest for any."""
        if words:
            raise InvalidRequest.field(
                "bad_words", "", "this base has no tokenizer.json; send bad_token_ids"
            )
        return set()


def _as_system(message: Mapping[str, object]) -> Mapping[str, object]:
    """OpenAI's newer name of the system role, for templates that do not know it."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _cut_lengths(lengths: Sequence[int], num_tokens: int) -> list[int]:
    """Lengths of one or two texts that are cut to `num_tokens` together. As in transformers, the
    longer one is cut first, and then both alike."""
    if len(lengths) == 1 or sum(lengths) <= num_tokens:
        return [min(length, num_tokens) for length in lengths]
    shorter = min(*lengths, num_tokens // 2)
    longer = num_tokens - shorter
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]


def _truncated(ids: tuple[int, ...], truncation: Truncation | None) -> tuple[int, ...]:
    if truncation is None or len(ids) <= truncation.max_tokens:
        return ids
    return ids[-truncation.max_tokens :] if truncation.keeps_end else ids[: truncation.max_tokens]


def check_length(text: str, base: ServedModel, field: str) -> None:
    """Raises: InvalidRequest for a text that cannot fit the context, however it is tokenized."""
    most = base.max_model_len * MAX_CHARS_PER_TOKEN
    if len(text) > most:
        raise InvalidRequest.field(
            field,
            "",
            f"this model's maximum context length is {base.max_model_len} tokens, and a text of "
            f"{len(text)} characters is longer; shorten it",
            reason=CONTEXT_LENGTH_EXCEEDED,
        )


def check_ids(ids: tuple[int, ...], base: ServedModel) -> tuple[int, ...]:
    """Returns the ids. Raises: InvalidRequest if there are none or one is out of range."""
    if not ids:
        raise InvalidRequest.field("prompt", "", "the prompt is empty; send at least one token")
    if base.refusal_of(min(ids)) or base.refusal_of(max(ids)):
        index, why = next((i, why) for i, id_ in enumerate(ids) if (why := base.refusal_of(id_)))
        raise InvalidRequest.field("prompt", "", f"token id at index {index} {why}")
    return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest.field(
            "prompt", "", "the text holds half a surrogate pair; send valid Unicode"
        ) from None


def _load(source: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_str(source.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    resize = getattr(tokenizer.model, "_resize_cache", None)  # not all models keep words
    if resize is not None:
        resize(_MAX_KEPT_WORDS)
    return tokenizer


def _sharing(tokenizer: Tokenizer) -> Tokenizer:
    """Another tokenizer on the same model without its added tokens, sharing large data."""
    made = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(made, part, value)
    return made


def _add(tokenizer: Tokenizer, tokens: Mapping[int, tokenizers.AddedToken]) -> None:
    """Add tokens, ordered by id. Raises: ValueError if the library gave one another id.

    All are added at once, special or not: each call takes time for all tokens so far.
    """
    tokenizer.add_tokens(list(tokens.values()))
    for token_id, token in tokens.items():
        if tokenizer.token_to_id(token.content) != token_id:
            raise ValueError(f"tokenizers gave {token.content!r} another id than {token_id}")


def _for_library(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


@dataclass(frozen=True, slots=True)
class ServedBase:
    """A base and its tokenizer."""

    model: ServedModel
    tokenizer: BaseTokenizer | IdsOnly
