"""The plain types that pass between the gateway's folders. No grpc, no HTTP.

The APIs parse a `GenerateCall`. The pipeline turns it into one `WorkerJob` per choice. Workers
answer with `Tokens`, which the pipeline turns into `TextDelta`s for the APIs to send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loraplex.adapter_format import File
from loraplex.adapter_format.pooling_fields import PoolingFields
from loraplex.adapter_format.rope_scaling import RopeScaling
from loraplex.adapter_format.tasks import CAUSAL_LM
from loraplex.adapter_format.vocabulary import MAX_ADDED_TOKENS
from loraplex.api.output import (
    FinishReason,
    PackedLogprobs,
    RoutedExperts,
    Timings,
    TokenLogprob,
    WeightSpan,
)
from loraplex.api.pooling import Pooling
from loraplex.api.request import (
    ChatPrompt,
    GenerateRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    WorkerRequest,
)
from loraplex.errors import InvalidRequest, LoraplexError, Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall(GenerateRequest):
    """A `GenerateRequest` with its caller and deadline; made by the HTTP and gRPC servers."""

    tenant: str
    runs_all: bool = False
    """Whether the caller may run the adapters of all tenants, as the operator may."""
    timeout_s: float | None = None
    """Time left until the client's deadline; None = the gateway's limit."""
    trace: str = ""
    """W3C traceparent; may be empty."""
    pooling: Pooling = Pooling.NONE
    truncate_prompt_tokens: int | None = None
    """The most tokens of the prompt that are used, the last ones, or the first ones for a vector;
    -1 = what fits the context, None = a prompt that is too long is refused."""

    @property
    def viewer(self) -> str | None:
        """The tenant whose adapters may run; None = those of all tenants."""
        return None if self.runs_all else self.tenant


@dataclass(frozen=True, slots=True)
class Truncation:
    """The tokens that are used of a prompt that is too long."""

    max_tokens: int
    keeps_end: bool
    """Otherwise the beginning is kept."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become text; applied at the gateway."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    """Stop strings are not looked for in the text of this many first tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedContent:
    """The facts about an adapter's content that requests need."""

    max_rank: int = 0
    text_files: tuple[File, ...] = ()
    """The adapter's own tokenizer and chat template, if it has any."""
    task: str = CAUSAL_LM
    pooling: PoolingFields = field(default_factory=PoolingFields)
    """How its vectors and scores are read; `num_labels` is that of its head."""
    rope_scaling: RopeScaling | None = None
    """A rotary embedding of the adapter's own, which may lengthen its context."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end its output if it is alone; empty = the base's."""
    is_ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class RunningAdapter(ServedContent):
    """An adapter after resolution."""

    label: str
    """tenant/name:vN."""
    digest: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """The present meaning of a model string: a base and the adapters on it."""

    base_id: str
    adapters: tuple[RunningAdapter, ...] = ()

    def tokenizer_digest(self, base: ServedModel) -> str:
        """Digest of the files that make tokens of a prompt and render a chat: the base's, and those
        of an adapter with files of its own. The digest of an adapter does not cover them."""
        files = self.adapters[0].text_files if len(self.adapters) == 1 else ()
        if not files:
            return base.tokenizer_digest
        own = sorted(f"{file.path} {file.sha256}" for file in files)
        joined = "\n".join((base.tokenizer_digest, *own))
        return f"sha256:{hashlib.sha256(joined.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """One sequence to be run by some worker of a base until a deadline."""

    request: WorkerRequest
    """The request without the times that remain, which each attempt sets."""
    base_id: str
    deadline_s: float
    """Absolute, on the gateway's monotonic clock."""
    first_token_due_s: float | None = None
    """Deadline of the first token, on the same clock; None = only `deadline_s` counts."""

    @property
    def start_by_s(self) -> float:
        """When a request without a first token expires."""
        due_s = self.first_token_due_s
        return self.deadline_s if due_s is None else min(due_s, self.deadline_s)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that one or more steps added to one sequence."""

    token_ids: tuple[int, ...]
    position: int
    """Output position of the first of `token_ids`, counted from 0."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: PackedLogprobs | None = None
    """Only with the first tokens."""
    cached_tokens: int = 0
    timings: Timings | None = None
    worker_id: str = ""
    digests: tuple[str, ...] = ()
    """Digests of the adapters that computed `token_ids`."""
    routed_experts: RoutedExperts | None = None
    """Of the positions before the last of `token_ids`, from where the event before ended."""
    pooled: tuple[float, ...] = ()
    """The vector of a job that pools."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New output of one choice, as an API sends it."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: Iterable[TokenLogprob] = ()
    offsets: tuple[int, ...] = ()
    """Character offset in the choice's output at which each token begins to add text."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PackedLogprobs | None = None
    cached_tokens: int = 0
    timings: Timings | None = None
    worker_id: str = ""
    spans: tuple[WeightSpan, ...] = ()
    """The adapters that computed `token_ids`."""
    routed_experts: RoutedExperts | None = None
    """As in `Tokens`."""
    pooled: tuple[float, ...] = ()
    """The vector that a call for one ends with."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served base, as its workers describe it in `GetModel`."""

    base_id: str
    vocab_size: int
    max_model_len: int
    caps_context: bool = False
    """Whether that was set, so that no adapter has a longer context."""
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    max_lora_rank: int = 0
    fingerprint: str = ""
    dtype: str = ""
    tokenizer_digest: str = ""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling defaults of generation_config.json, by our field names."""
    created_unix_s: int = 0
    routing_bytes: int = 0
    """Bytes of the experts of one token; 0 = the workers cannot return them."""
    num_more_ids: int = 0
    """Tokens that adapters may add to the vocabulary, at most."""

    def under(self, adapters: Sequence[RunningAdapter]) -> ServedModel:
        """The base as far as token ids and lengths go: adapters may add tokens, and only the
        worker knows how many; one alone may have a context of its own."""
        if not adapters:
            return self
        context = self.max_model_len
        scaling = adapters[0].rope_scaling if len(adapters) == 1 else None
        if scaling is not None and not self.caps_context:
            context = scaling.context_tokens(context)
        return replace(self, num_more_ids=MAX_ADDED_TOKENS, max_model_len=context)

    def refusal_of(self, token_id: int) -> str:
        """Why an id is no token of this model; "" if it may be one."""
        if 0 <= token_id < self.vocab_size + self.num_more_ids:
            return ""
        more = f", and adapters add at most {self.num_more_ids}" if self.num_more_ids else ""
        return f"is outside 0..{self.vocab_size - 1}{more}"


_BEGINNING = 4096
"""Characters or tokens."""


def beginning_hash(prompt: Prompt) -> str:
    """A hash that is the same for all requests of one conversation. A long text counts with its
    beginning only, because requests have it taken before their length is checked."""
    match prompt:
        case TextPrompt(text):
            start = text[:_BEGINNING]
        case TokenPrompt(ids):
            start = repr(ids[:_BEGINNING])
        case ChatPrompt():
            start = str(prompt.messages[0].get("content"))[:_BEGINNING]
    return hashlib.sha256(start.encode("utf-8", "surrogatepass")).hexdigest()


def with_names(error: LoraplexError, names: Mapping[str, str]) -> LoraplexError:
    """The error with the field names that the caller uses. Mutates: error."""
    renamed = [
        Violation(names.get(v.field, v.field), v.value, v.description) for v in error.violations
    ]
    if isinstance(error, InvalidRequest) and len(renamed) == 1:
        error.message = f"{renamed[0].field}: {renamed[0].description}"
        error.args = (error.message,)
    error.violations = tuple(renamed)
    return error


def name_adapters(error: InvalidRequest, labels: Mapping[str, str]) -> None:
    """Replace the digests of adapters, by which workers know them, with their labels.
    Mutates: error."""

    def named(text: str) -> str:
        for digest, label in labels.items():
            text = text.replace(digest, label)
        return text

    error.message = named(error.message)
    error.args = (error.message,)
    error.violations = tuple(
        Violation(v.field, named(v.value), named(v.description)) for v in error.violations
    )
