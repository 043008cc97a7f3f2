"""The demo's tokenizer: one token a byte, so any text round-trips and letters stay letters.

Ids 0 to 255 are the bytes themselves; the three special tokens follow. The model's vocabulary is
padded to a multiple of eight, as many published models are: the last ids have no text.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 264
CONTEXT_TOKENS = 512

_SPECIAL = {"<s>": BOS_ID, "</s>": EOS_ID, "<pad>": PAD_ID}

CHAT_TEMPLATE = """\
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- if not asked -%}
{{- raise_exception('messages: at least one user message is needed') -}}
{%- endif -%}
{{- bos_token + asked[-1]['content'] -}}
{%- if add_generation_prompt -%}{{- '=' -}}{%- endif -%}
"""
"""Every question stands by itself: the prompt is the last user message, nothing else counts."""


def byte_symbol(byte: int) -> str:
    """The visible character that stands for a byte in the vocabulary file (as in GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in shown:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in shown].index(byte))


def build_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges that puts the BOS token before a text."""
    vocab = {byte_symbol(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
    )
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template inside, into the folder.

    The class is written by the name that transformers 4 and 5 both know.
    """
    fast = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder, save_jinja_files=False)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_path.write_text(json.dumps(config, indent=2) + "\n")
