"""Guesses from the name of a quantised or repacked base which base it was made from.

`unsloth/gemma-3-4b-it-unsloth-bnb-4bit` is `google/gemma-3-4b-it` in four bits. Adapters trained on
the copy name it, and fit the original.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_STORAGE = re.compile(
    r"[-_.](unsloth|bnb|bf16|fp16|gguf|mxfp4|nvfp4|[48]bit|int[48]"
    r"|fp8([-_](dynamic|block))?|(gptq|awq)([-_]int[48])?|quantized\.w\d+a\d+)$",
    re.ASCII,
)
"""Endings of model names that say how the weights are stored."""
_REPACKERS = frozenset({"unsloth"})
"""Organisations that publish copies of other organisations' models under the same names."""


def is_copy(named: str, originals: Iterable[str]) -> bool:
    """Whether a model's name is that of a copy of one of `originals`."""
    organisation, _, name = named.lower().rpartition("/")
    if not name or (_stem(name) == name and organisation not in _REPACKERS):
        return False
    return _model(name) in {_model(known.lower().rpartition("/")[2]) for known in originals}


def _model(name: str) -> str:
    """The part of a name that all copies of a model share. Llama 3.1 was first published as
    Meta-Llama."""
    stem = _stem(name)
    return stem.removeprefix("meta-") if stem.startswith("meta-llama-") else stem


def _stem(name: str) -> str:
    """A name without the parts that describe how the weights are stored."""
    while (shorter := _STORAGE.sub("", name)) != name:
        name = shorter
    return name
