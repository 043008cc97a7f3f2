"""Tokenizers built on the spot, and the files a worker would hand out for them."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 264
"""Ids 259 to 263 are legal and have no text."""

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


_SHOWN = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]


def byte_symbol(byte: int) -> str:
    """The visible stand-in of a byte in byte-level vocabularies."""
    return chr(byte if byte in _SHOWN else 256 + _HIDDEN.index(byte))


def byte_tokenizer() -> Tokenizer:
    """One token a byte; a text begins with <s>."""
    vocab = {byte_symbol(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<pad>")]
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
    )
    return tokenizer


def tokenizer_files(chat_template: str | None = CHAT_TEMPLATE) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json of `byte_tokenizer`."""
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if chat_template is not None:
        config["chat_template"] = chat_template
    return {
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
