"""Reads the config fields that all families share; each family changes what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.rope_config import read_rope
from loraplex_services.worker.ops.activation.torch import ACTIVATIONS
from loraplex_services.worker.types.model_config import ModelConfig

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values of absent keys in a family."""

    head_dim: int | None = None
    """None = hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """None = num_attention_heads, which is also what null in the file means."""
    tied_embeddings: bool = False
    norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    original_max_position_embeddings: int | None = None
    """Original context of a scaled rotary embedding; None = the family has no such key."""
    rotates_part: bool = False
    """Whether `partial_rotary_factor` is read: a part of each head may rotate."""


def read_plain(
    reader: ModelConfigReader,
    model_type: str,
    eos_token_ids: tuple[int, ...],
    defaults: Defaults | None = None,
) -> ModelConfig:
    """A decoder without biases, windows and other special features, with one rotary embedding.

    Raises Unsupported for a key with a value that is not served.
    """
    absent = defaults or Defaults()
    num_heads = reader.integer("num_attention_heads")
    hidden_size = reader.integer("hidden_size")
    head_dim = reader.integer("head_dim", absent.head_dim or hidden_size // num_heads)
    num_layers = reader.integer("num_hidden_layers")
    num_kv_heads = None if reader.is_null("num_key_value_heads") else absent.num_kv_heads
    max_tokens = reader.integer("max_position_embeddings", absent.max_position_embeddings)
    rope = read_rope(
        reader.replaced("max_position_embeddings", max_tokens),
        head_dim,
        absent.rope_theta,
        absent.original_max_position_embeddings,
        rotates_part=absent.rotates_part,
    )
    return ModelConfig(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", num_kv_heads or num_heads),
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", absent.norm_eps),
        activation=reader.expect(absent.activation_key, tuple(ACTIVATIONS), absent.activation),
        max_position_embeddings=max_tokens,
        tied_embeddings=reader.flag("tie_word_embeddings", absent.tied_embeddings),
        eos_token_ids=eos_token_ids,
        windows=(None,) * num_layers,
        ropes=(rope,) * num_layers,
        attention_scale=head_dim**-0.5,
    )


def read_layer_types(
    reader: ModelConfigReader, num_layers: int, default: Sequence[str], other: str = SLIDING
) -> tuple[str, ...]:
    """`layer_types`, each full attention or `other`."""
    types = reader.get("layer_types", list(default))
    if not isinstance(types, list) or len(types) != num_layers:
        raise reader.refuse("layer_types", types, f"must be a list of {num_layers} names")
    for name in types:
        if name not in (FULL, other):
            raise reader.refuse("layer_types", name, f"is not served; known: {FULL}, {other}")
    return tuple(types)


def windows_of(types: Sequence[str], window: int) -> tuple[int | None, ...]:
    """Sliding window of each layer."""
    return tuple(window if name == SLIDING else None for name in types)
