"""Names of modules in families that do not name them as Llama does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

FUSED_NAMES = (
    (re.compile(r"(?<![a-z])[qkv]_proj"), "qkv_proj"),
    (re.compile(r"(?<![a-z])(gate|up)_proj"), "gate_up_proj"),
)
_NAMES_OF_GPT2 = (
    (re.compile(r"[qkv]_proj"), "c_attn"),
    (re.compile(r"(gate|up)_proj"), "c_fc"),
    (re.compile(r"(mlp\\\.)?(o|down)_proj"), "c_proj"),
    (re.compile("embed_tokens"), "wte"),
    (re.compile("layers"), "h"),
)
_NAMES_OF_LATENT_ATTENTION = (
    (re.compile(r"q_proj"), "q_b_proj"),
    (re.compile(r"[kv]_proj"), "kv_b_proj"),
)
_NAMES_OF_GPT_NEOX = (
    (re.compile(r"[qkv]_proj"), "query_key_value"),
    (re.compile(r"(gate|up)_proj"), "dense_h_to_4h"),
    (re.compile(r"down_proj"), "dense_4h_to_h"),
    (re.compile(r"o_proj"), "dense"),
)
OTHER_NAMES = {
    "phi3": FUSED_NAMES,
    "gpt2": _NAMES_OF_GPT2,
    "gpt-bigcode": _NAMES_OF_GPT2,
    "gpt-neox": (
        *_NAMES_OF_GPT_NEOX,
        (re.compile("embed_tokens"), "embed_in"),
        (re.compile("lm_head"), "embed_out"),
    ),
    "falcon": (
        *_NAMES_OF_GPT_NEOX,
        (re.compile("embed_tokens"), "word_embeddings"),
        (re.compile("layers"), "h"),
    ),
    "opt": ((re.compile("o_proj"), "out_proj"), (re.compile("down_proj"), "fc2")),
    "deepseek": _NAMES_OF_LATENT_ATTENTION,
    "glm4-moe-lite": _NAMES_OF_LATENT_ATTENTION,
    "minicpm3": _NAMES_OF_LATENT_ATTENTION,
    "longcat": _NAMES_OF_LATENT_ATTENTION,
    "youtu": _NAMES_OF_LATENT_ATTENTION,
    "axk1": _NAMES_OF_LATENT_ATTENTION,
    "persimmon": _NAMES_OF_GPT_NEOX,
}
"""By what the name of a base begins with: its names of modules."""


def _renamed(value: object, names: Sequence[tuple[re.Pattern[str], str]]) -> object:
    """The same feature on a base whose modules have other names."""
    if isinstance(value, str):
        for pattern, name in names:
            value = pattern.sub(name, value)
        return value
    if isinstance(value, list):
        return sorted({_renamed(item, names) for item in value}, key=str)
    if isinstance(value, dict):
        return {_renamed(key, names): item for key, item in value.items()}
    return value


def with_names_of(base_name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A feature with the names of a base."""
    for family, names in OTHER_NAMES.items():
        if base_name.startswith(family):
            return {
                key: value if key == "trainable_token_indices" else _renamed(value, names)
                for key, value in fields.items()
            }
    return fields
