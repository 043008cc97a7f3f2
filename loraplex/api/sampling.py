"""Sampling parameters, and the grammar that an output must match."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import NamedTuple


def _texts(value: Sequence[str]) -> Sequence[str]:
    """A lone text is one item, not one for each of its characters. Type checkers see no error."""
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole output must match; exactly one field is set."""

    json_schema: str | Mapping[str, object] | None = None
    """A JSON Schema. An object is kept as its text."""
    regex: str | None = None
    ebnf: str | None = None
    """A grammar in Lark's notation, or in GBNF with a rule `root`."""
    choice: Sequence[str] | None = None
    """The only outputs allowed. They are kept as a tuple."""

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(_texts(self.choice)))

    @property
    def forms(self) -> tuple[str, ...]:
        """The names of the fields that are set."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def form(self) -> str:
        """The name of the one field that is set; "" if none or several are."""
        forms = self.forms
        return forms[0] if len(forms) == 1 else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of the grammar, or the options of a choice; empty without a form."""
        if not self.form:
            return ()
        value = getattr(self, self.form)
        return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """How the tokens of an adapter differ from the base's, as far as grammars are concerned."""

    added: tuple[tuple[int, str], ...] = ()
    """Id and text of each token that the base's tokenizer lacks, without special tokens."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end the output; empty = the base's EOS ids."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling and output options as a caller requests them. None = the default.

    The fields have the names of `SamplingParams` in inference.proto. Types are those declared here;
    ranges are checked by the gateway.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    """0 takes the most likely token."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """Makes sampling reproducible."""
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logit of each token id."""
    logprobs: int | None = None
    """Alternatives per output token; None = no logprobs."""
    logprob_token_ids: Sequence[int] = ()
    """The alternatives, in this order, instead of the most likely ones; needs `logprobs`."""
    prompt_logprobs: int | None = None
    n: int | None = None
    """The number of choices."""
    echo: bool = False
    grammar: Grammar | None = None
    allowed_token_ids: Sequence[int] = ()
    bad_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    """Words that are not generated, as the tokenizer writes them with and without a space
    before."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    scale: float | None = None
    """Multiplies the weight of every adapter of the request."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _texts(self.stop))
        object.__setattr__(self, "bad_words", _texts(self.bad_words))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with every default resolved, as workers receive them.

    The fields have the names of `WorkerSampling` in worker.proto. Counts are in tokens of the whole
    output. A field that a message leaves out has the value given here, which turns it off.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and what is added to its logit."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be generated; empty = all."""
    bad_token_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of two tokens or more. The last token may not follow the others in the output."""
    logprobs: int | None = None
    """Alternatives per output token; None = no logprobs at all."""
    logprob_token_ids: tuple[int, ...] = ()
    """The alternatives, in this order; empty = the most likely ones."""
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens of the output become more or less likely."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def edits_logits(self) -> bool:
        """Whether some token's logit may be changed, or its choice forbidden."""
        masks = self.allowed_token_ids or self.bad_token_ids or self.bad_sequences
        return bool(masks or self.logit_bias or self.min_tokens or self.has_penalties)


class Range(NamedTuple):
    """The values that a number may have."""

    least: float
    most: float
    excludes_least: bool = False

    def fault(self, value: float) -> str:
        """Say what is wrong with a value and what to send instead; "" if it is allowed."""
        is_inside = self.least <= value <= self.most and math.isfinite(value)
        if is_inside and not (self.excludes_least and value == self.least):
            return ""
        if self.excludes_least:
            return f"must be above {self.least:g} and at most {self.most:g}"
        return f"must be a number from {self.least:g} to {self.most:g}"


RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range(0.0, 100.0),
        "top_p": Range(0.0, 1.0, excludes_least=True),
        "min_p": Range(0.0, 1.0),
        "repetition_penalty": Range(0.0, 1000.0, excludes_least=True),
        "presence_penalty": Range(-2.0, 2.0),
        "frequency_penalty": Range(-2.0, 2.0),
    }
)
"""The ranges of the parameters that are numbers, for the gateway and the worker."""
