"""What a base model is, read from Hugging Face's `config.json` exactly once.

Names of Hugging Face stop here. Whatever a family does not read and that is not known to be
harmless is refused by name: a field that changes the arithmetic must not be ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.errors import InvalidRequest, Unsupported

HARMLESS_KEYS = frozenset(
    """
    _attn_implementation _name_or_path architectures attention_dropout
    auto_map bos_token_id cache_implementation chunk_size_feed_forward dtype embd_pdrop
    eos_token_id finetuning_task id2label initializer_range label2id
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp
    problem_type resid_pdrop return_dict router_aux_loss_coef router_jitter_noise sep_token_id
    task_specific_params tokenizer_class torch_dtype transformers_version unsloth_fixed
    unsloth_version use_cache use_return_dict
    """.split()
)
"""Keys that change nothing at inference, or that another reader takes (`eos_token_id`)."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer."""

    dim: int
    """Leading part of the head that rotates."""
    theta: float
    kind: str = "default"
    """default, linear, dynamic, llama3, yarn or longrope."""
    params: tuple[tuple[str, Any], ...] = ()
    """Numbers of the scaling method, sorted by name."""

    @property
    def switch_len(self) -> int | None:
        """Sequences of more tokens than this rotate otherwise, from their first token on."""
        if self.kind != "longrope":
            return None
        return int(dict(self.params)["original_max_position_embeddings"])


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sparse MLP of a mixture of experts."""

    num_experts: int
    num_active: int
    intermediate_size: int
    renormalise: bool
    """Scale the chosen experts' router weights so that they sum to 1."""
    shared_intermediate_size: int | None = None
    """Width of the expert that every token visits, if there is one."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a plain MLP."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and arithmetic of a decoder, every default resolved."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position_embeddings: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None = full attention."""
    ropes: tuple[RopeConfig, ...]
    """Rotary embedding of each layer."""
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Normalise each query and key head before it is rotated."""
    norm_offset: float = 0.0
    """Added to every norm weight (Gemma stores weight - 1)."""
    norm_in_float32: bool = False
    """Multiply by the norm weight before rounding to the model's dtype, not after."""
    post_norms: bool = False
    """Normalise what attention and MLP return, too."""
    embed_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    moe: MoeConfig | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @property
    def rope_switch_len(self) -> int | None:
        """See `RopeConfig.switch_len`; families with such a method have one for all layers."""
        return self.ropes[0].switch_len

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim


class ConfigReader:
    """Reads keys of one JSON object, remembers which, and refuses what is left over."""

    def __init__(self, raw: dict[str, Any], source: str = "config.json") -> None:
        self._raw = raw
        self._source = source
        self._seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key; null counts as absent."""
        self._seen.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self.refuse(key, value, "must be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number, as float."""
        value = self.get(key, default)
        if type(value) not in (int, float):
            raise self.refuse(key, value, "must be a number")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A number, or None where the file says null."""
        if self.is_null(key) or (key not in self._raw and default is None):
            self._seen.add(key)
            return None
        return self.number(key, default)

    def is_null(self, key: str) -> bool:
        """Whether the file holds the key with null, which may differ from leaving it out."""
        self._seen.add(key)
        return key in self._raw and self._raw[key] is None

    def without(self, key: str) -> ConfigReader:
        """A reader of the other keys; what it reads counts here, too."""
        other = ConfigReader({k: v for k, v in self._raw.items() if k != key}, self._source)
        other._seen = self._seen
        return other

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, value, "must be true or false")
        return value

    def expect(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """A value out of a list."""
        value = self.get(key, default)
        if value not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise self.refuse(key, value, f"is not served; this build knows {choices}")
        return value

    def finish(self) -> None:
        """Refuse keys that nobody read, unless they are harmless or say nothing."""
        for key, value in self._raw.items():
            if key in self._seen or key in HARMLESS_KEYS or key.startswith("_"):
                continue
            if value not in (None, False, [], {}, ""):
                raise self.refuse(key, value, "is not known to this model family in this build")

    def refuse(self, key: str, value: object, description: str) -> Unsupported:
        """The error for one key."""
        return Unsupported.field(f"{self._source}:{key}", value, description)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        InvalidRequest: when it is missing or something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest.field(path.name, str(path), f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest.field(path.name, str(path), "must hold a JSON object")
    return value


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json, sorted."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            value = read_json_object(folder / name).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
