"""The request from a client to a gateway, and the request from a gateway to a worker."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from loraplex.api.pooling import Pooling
from loraplex.api.sampling import Grammar, GrammarTokens, Sampling, SamplingParams
from loraplex.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to be tokenized, by default with special tokens such as BOS."""

    text: str
    add_special_tokens: bool = True
    pair: str = ""
    """A second text that follows it as the tokenizer joins pairs. It has no form in gRPC."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Vocabulary indices, taken as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the chat template, which by default writes all special tokens itself.

    Only `messages` have a form in gRPC; the other fields are those of HTTP requests.
    """

    messages: tuple[Mapping[str, object], ...]
    add_special_tokens: bool = False
    tools: tuple[Mapping[str, object], ...] = ()
    """Functions that the template describes to the model."""
    template_options: Mapping[str, object] = field(default_factory=dict)
    """Further variables of the template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends with the last message, which the output continues."""


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class UpdatePolicy(enum.StrEnum):
    """The way in which a running request continues when a tag that it named moves."""

    FINISH = "finish"
    """It ends with the version that it began with."""
    FOLLOW = "follow"
    """It continues with the new version, which computes the prompt and the output so far again."""
    FOLLOW_KEEP_PREFIX = "follow_keep_prefix"
    """The same, with the KV of the tokens so far as the old version computed it, where that is
    still cached."""

    @classmethod
    def parse(cls, text: str) -> UpdatePolicy:
        """The policy of this name. Raises: InvalidRequest."""
        try:
            return cls(text)
        except ValueError:
            known = ", ".join(cls)
            raise InvalidRequest.field("on_update", text, f"must be one of {known}") from None


@dataclass(frozen=True, slots=True)
class RequestedAdapter:
    """One adapter of a request as the caller names it."""

    ref: str
    weight: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt for one base or adapter, in names and text; made by a client for a gateway.

    The fields have the names of `GenerateRequest` in inference.proto.
    """

    model: str
    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    adapters: tuple[RequestedAdapter, ...] = ()
    """Several, to be combined; `model` is then the base."""
    request_id: str = ""
    """The gateway makes one if it is empty."""
    cache_salt: str = ""
    priority: int = 0
    split_key: str = ""
    first_token_s: float | None = None
    """Limit on the time to first token; None = only the deadline counts."""
    on_update: UpdatePolicy = UpdatePolicy.FINISH
    routed_from: int | None = None
    """First position of the prompt from which on the experts of each token are returned; None =
    they are not."""


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of a request: sorted (digest, weight) pairs; empty = the base."""

    adapters: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        assert tuple(sorted(self.adapters)) == self.adapters, "adapters must be sorted by digest"

    @classmethod
    def of(cls, adapters: Iterable[tuple[str, float]]) -> AdapterSet:
        """The set of (digest, weight) pairs in any order."""
        return cls(tuple(sorted(adapters)))

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests in order."""
        return tuple(digest for digest, _ in self.adapters)

    def within(self, digests: Collection[str]) -> bool:
        """Whether all of them are among `digests`."""
        return all(digest in digests for digest, _ in self.adapters)

    def key(self) -> str:
        """Hash that keys the prefix cache and accounting."""
        text = ";".join(f"{digest}*{weight!r}" for digest, weight in self.adapters)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """Tokens of a request whose KV may stay as other adapters computed it."""

    adapters: AdapterSet
    num_tokens: int
    """Number of tokens from the start of the prompt, including earlier parts."""


BASE_ONLY = AdapterSet()
"""No adapters."""
BACKGROUND_PRIORITY = (1 << 31) - 1
"""Requests with the last of all priorities, such as the lines of batch jobs, give way to those of
all tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """One sequence in token ids and digests; made by a gateway for each choice and each attempt.

    With `output_ids`, it continues where another worker stopped. The engine keeps the sequence and
    its state in a `Request`. The fields have the names of `WorkerRequest` in worker.proto. One that
    a message leaves out has the default given here.
    """

    request_id: str = ""
    """Unique among the live requests of a session with a worker."""
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()
    sampling: SamplingParams
    adapters: AdapterSet = BASE_ONLY
    tenant: str = "default"
    priority: int = 0
    fairness_weight: float = 1.0
    """Fairness weight of the tenant, for the worker's queue."""
    cache_salt: str = ""
    sample_index: int = 0
    remaining_s: float | None = None
    """Seconds until the deadline; None = no deadline."""
    remaining_first_token_s: float | None = None
    """Seconds until the first token is due; None = only the deadline counts."""
    trace: str = ""
    """W3C traceparent; may be empty."""
    grammar: Grammar | None = None
    grammar_tokens: GrammarTokens = field(default_factory=GrammarTokens)
    kept: tuple[KeptPrefix, ...] = ()
    """Which other adapters computed its first tokens, in order."""
    pooling: Pooling = Pooling.NONE
    """If set, the request returns a vector and no output."""
    routed_from: int | None = None
    """First position of prompt and output from which on the experts of each token are returned;
    None = they are not."""
