"""Reads Hugging Face's `config.json`.

Names of Hugging Face are not used beyond this module. A field that a family does not read and that
is not known to be harmless is refused by name, because it might change the arithmetic.
"""

from __future__ import annotations

import json
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


class ModelConfigReader:
    """Reads keys of one JSON object, remembers which, and refuses what is left over.

    Methods that check a value raise the error of `refuse`.
    """

    def __init__(self, raw: dict[str, Any], source: str = "config.json:") -> None:
        """`source` begins the names of keys in errors."""
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

    def optional_integer(self, key: str) -> int | None:
        """A positive integer; None if the file has null, or nothing."""
        return None if self.get(key) is None else self.integer(key)

    def count(self, key: str, default: int) -> int:
        """An integer of at least 0."""
        value = self.get(key, default)
        if type(value) is not int or value < 0:
            raise self.refuse(key, value, "must be an integer of at least 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number, as float."""
        value = self.get(key, default)
        if type(value) not in (int, float):
            raise self.refuse(key, value, "must be a number")
        return float(value)

    def positive(self, key: str, default: float | None) -> float:
        """A number above 0, as float."""
        value = self.number(key, default)
        if value <= 0:
            raise self.refuse(key, value, "must be above 0")
        return value

    def optional_positive(self, key: str, default: float | None) -> float | None:
        """A number above 0, or None if the value in the file is null."""
        if self.is_null(key) or (key not in self._raw and default is None):
            self._seen.add(key)
            return None
        return self.positive(key, default)

    def is_null(self, key: str) -> bool:
        """Whether the file holds the key with null, which may differ from leaving it out."""
        self._seen.add(key)
        return key in self._raw and self._raw[key] is None

    def without(self, key: str) -> ModelConfigReader:
        """A reader of the other keys; what it reads counts here as well."""
        other = ModelConfigReader({k: v for k, v in self._raw.items() if k != key}, self._source)
        other._seen = self._seen
        return other

    def replaced(self, key: str, value: Any) -> ModelConfigReader:
        """A reader with another value of one key; what it reads counts here as well."""
        other = ModelConfigReader({**self._raw, key: value}, self._source)
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
        """Refuse keys that were not read, unless they are harmless or have no effect."""
        for key, value in self._raw.items():
            if key in self._seen or key in HARMLESS_KEYS or key.startswith("_"):
                continue
            if value not in (None, False, [], {}, ""):
                why = (
                    "is not known to this model family in this build; remove it if it changes "
                    "nothing, or serve the base with --model-impl transformers"
                )
                raise self.refuse(key, value, why)

    def refuse(self, key: str, value: object, description: str) -> Unsupported:
        """The error for one key."""
        return Unsupported.field(f"{self._source}{key}", value, description)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        InvalidRequest: when it is missing or something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not isinstance(value, dict):
        raise InvalidRequest.field(path.name, str(path), "must hold a JSON object")
    return value


def unreadable(path: Path, error: Exception) -> InvalidRequest:
    """The error for a file of the base that is missing or damaged."""
    why = f"cannot be read ({error}); copy or download the base again"
    return InvalidRequest.field(path.name, str(path), why)


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json, sorted.

    Raises:
        InvalidRequest: a file is damaged, or names something else than token ids.
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            config = read_json_object(folder / name)
            inner = config.get("text_config")
            value = config.get("eos_token_id")
            if value is None and isinstance(inner, dict):
                value = inner.get("eos_token_id")
            found = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(token_id) is int and token_id >= 0 for token_id in found):
                why = "must be a token id or a list of them"
                raise InvalidRequest.field(f"{name}:eos_token_id", value, why)
            ids.update(found)
    return tuple(sorted(ids))
