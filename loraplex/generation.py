"""Asking for text and what comes back: frozen values, free of gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation rendered by the chat template."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that the whole output must belong to; exactly one field is set."""

    json_schema: str | Mapping[str, object] | None = None
    """A JSON Schema, as text or as an object."""
    regex: str | None = None
    ebnf: str | None = None
    """In Lark's notation."""
    choice: Sequence[str] | None = None
    """The only outputs allowed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when to stop. None = the gateway's default."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    """0 takes the most likely token."""
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """Makes sampling reproducible."""
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    echo: bool = False
    grammar: Grammar | None = None
    allowed_token_ids: Sequence[int] = ()
    bad_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    scale: float | None = None
    """Multiplies the weight of every adapter of the request."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token with the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position of prompt or output."""

    token: Candidate
    top: tuple[Candidate, ...]
    """The most likely tokens here, best first."""


@dataclass(frozen=True, slots=True)
class ServedBy:
    """What ran."""

    adapters: tuple[str, ...]
    """As tenant/name:vN; empty for the base."""
    digests: tuple[str, ...]
    worker_id: str
    base_id: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a request consumed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Measured by the worker, in seconds."""

    queue_s: float
    load_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message of a stream adds to one choice."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    """"stop", "length" or "cancelled" in the last piece of a choice."""
    stop_reason: str = ""
    """The matched stop string, or the id that stopped, as text."""
    served_by: ServedBy | None = None
    """In the first piece of each choice."""
    usage: Usage | None = None
    """In the last piece of the stream."""
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    served_by: ServedBy | None = None
    timings: Timings | None = None


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
    digest: str
    tier: str
    """"disk", "loading" or "device"."""
    max_rank: int
    device_bytes: int
    pinned: bool
    running_requests: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as a gateway sees it."""

    worker_id: str
    address: str
    base_id: str
    connected: bool
    ready: bool
    draining: bool
    running_requests: int
    waiting_requests: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    step_s: float
    steps: int
    max_distinct_adapters: int
    """The most adapters one step held since the worker started."""
    num_adapters_on_device: int
    adapters: tuple[ResidentAdapter, ...] = ()
    dtype: str = ""
    """Of its arithmetic; "" while it has never answered, or where it is older than this field."""
    kernels: str = ""
    """"triton", "torch", or an instruction set such as "avx512_bf16"."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An adapter that is loaded where its requests will go."""

    ref: str
    digest: str
    worker_ids: tuple[str, ...]
    """Its home first."""
    took_s: float


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
