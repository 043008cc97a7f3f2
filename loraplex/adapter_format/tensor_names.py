"""Reads from the name of a tensor in an adapter file which module and which part of it is meant."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "base_model.model."

A = "a"
B = "b"
LORA_BIAS = "lora_bias"
MAGNITUDE = "magnitude"
EMBEDDING_A = "embedding_a"
EMBEDDING_B = "embedding_b"
TOKEN_DELTA = "token_delta"
BASE_WEIGHT = "base_weight"
BASE_BIAS = "base_bias"
SAVED_COPY = "saved_copy"
ORIGINAL = "original"
SAVED_BIAS = "saved_bias"
ORIGINAL_BIAS = "original_bias"
WEIGHT = "weight"
BIAS = "bias"

LORA_PARTS = frozenset({A, B, LORA_BIAS, MAGNITUDE, EMBEDDING_A, EMBEDDING_B})

_SUFFIXES = (
    (".lora_A.weight", A),
    (".lora_B.weight", B),
    (".lora_B.bias", LORA_BIAS),
    (".lora_magnitude_vector", MAGNITUDE),
    (".lora_embedding_A", EMBEDDING_A),
    (".lora_embedding_B", EMBEDDING_B),
    (".token_adapter.trainable_tokens_delta", TOKEN_DELTA),
    (".token_adapter.base_layer.weight", BASE_WEIGHT),
    (".base_layer.weight", BASE_WEIGHT),
    (".base_layer.bias", BASE_BIAS),
    (".modules_to_save.weight", SAVED_COPY),
    (".original_module.weight", ORIGINAL),
    (".weight", WEIGHT),
    (".bias", BIAS),
)
_COPIES_OF_BIASES = ((".modules_to_save.", SAVED_BIAS), (".original_module.", ORIGINAL_BIAS))
_LORA_WORDS = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True, slots=True)
class TensorName:
    """The parts of a tensor's name."""

    module: str
    """Name of the module in the base, such as `model.layers.0.self_attn.q_proj`."""
    part: str
    """One of the constants of this file."""


class BadTensorName(Exception):
    """The name is not one that PEFT writes; the message says what is wrong and the way out."""


def split_tensor_name(name: str) -> TensorName:
    """Take a tensor's name apart.

    Raises:
        BadTensorName: PEFT would not load a tensor of this name.
    """
    if not name.startswith(PREFIX):
        raise BadTensorName(f"does not start with {PREFIX!r}; save the adapter with PEFT")
    inner = name[len(PREFIX) :]
    copy = _copy_of_bias(inner)
    if copy is not None:
        return copy
    for suffix, part in _SUFFIXES:
        if inner.endswith(suffix) and not _is_odd(inner[: -len(suffix)]):
            return TensorName(inner[: -len(suffix)], part)
    if any(word in _LORA_WORDS for word in inner.split(".")):
        raise BadTensorName(
            "carries an adapter name or a part that PEFT does not write to files; load the adapter "
            "with PEFT and save it with save_pretrained"
        )
    if inner.endswith(_WHOLE_EXPERTS):
        raise BadTensorName(
            "is the whole weight of a layer's experts, which is not served; take the experts out "
            "of modules_to_save and train LoRA on them (target_parameters)"
        )
    raise BadTensorName("is not a part of a LoRA adapter; remove it and save the adapter again")


def _copy_of_bias(inner: str) -> TensorName | None:
    """What PEFT also writes with bias="all" for biases in modules_to_save: of the module itself, or
    of one inside it, which follows the name of the adapter."""
    for word, part in _COPIES_OF_BIASES:
        module, found, rest = inner.partition(word)
        *inside, last = rest.split(".")
        if found and last == "bias":
            path = inside[1:] if part == SAVED_BIAS else inside
            return TensorName(".".join((module, *path)), part)
    return None


_WHOLE_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
"""The name that PEFT writes for experts in modules_to_save with transformers 5: all in one."""


def _is_odd(module: str) -> bool:
    """Whether the rest is no module name: empty, or with adapter parts inside."""
    return not module or ".lora_" in f".{module}"
