"""Plain types of generation requests and answers, without gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.api.load import RecentLoad
from loraplex.api.output import (
    FinishReason,
    RoutedExperts,
    ServedBy,
    Timings,
    TokenLogprob,
    Usage,
    WeightSpan,
)
from loraplex.api.residency import AdapterResidency, WorkerLoad
from loraplex.api.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation rendered by the chat template."""


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """The part of one choice that one message of a stream adds."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    reasoning: str = ""
    """Of a chat: what the model thinks before it answers; `text` is then the content alone."""
    digests: tuple[str, ...] = ()
    """Digests of the adapters that computed `token_ids`; empty for the base."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """In the first chunk of choice 0, one per token of the prompt; the first token has None."""
    finish_reason: FinishReason | None = None
    """In the last chunk of a choice."""
    stop_reason: str = ""
    """The stop string that matched, or the id of the stop token as text."""
    served_by: ServedBy | None = None
    """Set in the first chunk of each choice, and in the first one after a change of adapters."""
    usage: Usage | None = None
    """In the last chunk of the stream."""
    timings: Timings | None = None
    routed_experts: RoutedExperts | None = None
    """Of the tokens that no chunk had before, up to the last but one of `token_ids`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    served_by: ServedBy | None = None
    """The adapters that ran it first."""
    timings: Timings | None = None
    spans: tuple[WeightSpan, ...] = ()
    """Which adapters computed which tokens."""
    reasoning: str = ""
    """Of a chat: what the model thought before it answered."""
    routed_experts: RoutedExperts | None = None
    """Of all tokens of prompt and output from `routed_from` on, except the last one."""


@dataclass(frozen=True, slots=True)
class Completion:
    """All choices of one prompt."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Model:
    """A base or an adapter that can be named in a request."""

    id: str
    base_id: str
    digest: str
    """Empty for a base."""
    created_unix_s: int
    max_model_len: int
    """Context in tokens."""


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """One adapter on one worker."""

    ref: str
    """The adapter as tenant/name:vN; empty if the gateway does not know the name."""
    num_other_refs: int
    """Other names under which the same content was published."""
    residency: AdapterResidency


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as a gateway sees it."""

    worker_id: str
    address: str
    base_id: str
    connected: bool
    ready: bool
    draining: bool
    load: WorkerLoad
    num_adapters_on_device: int
    adapters: tuple[ResidentAdapter, ...] = ()
    dtype: str = ""
    """The dtype of its arithmetic; "" if it has never answered."""
    kernels: str = ""
    """"triton", "torch", or an instruction set such as "avx512_bf16"."""
    quantization: str = ""
    """The scheme in which the base was quantised when it was loaded; "" = it is served as
    published."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An adapter that is loaded on the workers that its requests will reach."""

    ref: str
    digest: str
    worker_ids: tuple[str, ...]
    """Workers in the order of preference."""
    took_s: float


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A request that ended, and what another version needs for a comparable answer."""

    prompt_ids: tuple[int, ...]
    prompt_text: str
    sampling: Sampling
    """With the seed and the most tokens that were used."""
    token_ids: tuple[int, ...]
    """The answer."""
    text: str
    digest: str
    """Digest of the version that answered."""


@dataclass(frozen=True, slots=True)
class Status:
    """A gateway's view of the stack behind it."""

    ready: bool
    not_ready_reason: str
    base_ids: tuple[str, ...]
    registry_connected: bool
    num_adapters: int
    running_requests: int
    queued_requests: int
    workers: tuple[WorkerStatus, ...]
    recent: RecentLoad | None = None
    """None for callers who may not see all adapters."""
