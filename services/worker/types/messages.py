"""Messages between the API server process and the engine process, as msgpack frames.

    server -> engine  one EngineConfig, then StepInput: commands in the order they were given
    engine -> server  EngineReady or EngineRefused, then one StepOutput a step that has any news,
                      Entered before the first step of a request, and PrefetchCopied

A frame is its length (4 bytes, little endian) and a msgpack body. Nothing is ever pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from loraplex.api.output import (
    FinishReason,
    PackedLogprobs,
    RoutedExperts,
    Timings,
    TokenLogprob,
)
from loraplex.api.request import WorkerRequest
from loraplex.api.residency import AdapterResidency, WorkerLoad
from loraplex.errors import LoraplexError, Violation, codes_of, from_wire
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.nodes import ONE_NODE, Nodes
from loraplex_services.worker.types.runner_protocol import ModelInfo
from loraplex_services.worker.types.runner_settings import RunnerSettings

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


class EngineConfig(RunnerSettings, frozen=True, kw_only=True):
    """The parameters of an engine process: those of its runner and of its scheduler.
    The API server process has resolved every default."""

    model_dir: str = ""
    """"" until the base has been found."""
    tensor_parallel: int = 1
    """Number of ranks that share the base, each in a process of its own. The engine process is rank
    0."""
    nodes: Nodes = ONE_NODE
    """The machines of these ranks. The engine process is on the first."""
    max_step_s: float = 0.0
    """Target duration in seconds of steps in which requests decode; see `SchedulerLimits`."""
    max_loras: int | None = None
    lora_bytes: int = 0
    """Most bytes of the arena for adapters; 0 = set by the next field."""
    lora_share: float = 1.0
    """Most of the arena for adapters, as a share of it."""
    cluster_size: int = 0
    """Number of running adapters from which requests for these go first; 0 = never."""
    prefix_cache: bool = True


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """A typed error."""

    code: int
    reason: str
    message: str
    violations: list[tuple[str, str, str]] = []
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: LoraplexError) -> WireError:
        """The error as plain data."""
        violations = [(v.field, v.value, v.description) for v in error.violations]
        code = codes_of(error).grpc
        return cls(code, error.reason, error.message, violations, error.retry_after_s)

    def to_error(self) -> LoraplexError:
        """The inverse of `of`."""
        violations = [Violation(*fields) for fields in self.violations]
        return from_wire(self.code, self.reason, self.message, violations, self.retry_after_s)


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Start a request, fresh or resumed."""

    request: WorkerRequest
    """Its id is unique among the live requests of the worker."""
    came_s: float | None = None
    """Arrival on the monotonic clock, which both processes share. A step may be in progress when
    the request arrives, and the wait for its end counts. None = the moment at which the engine
    reads it."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End a request without reporting its end. Unknown ids are ignored."""

    request_id: str


class AdapterFetched(msgspec.Struct, frozen=True, tag="fetched"):
    """A verified adapter is in `path`, and stays there until `Gone`."""

    digest: str
    path: str
    max_rank: int
    num_pages: int = 0
    """Pages of its packed image; 0 = the engine has to pack it, because that takes the base's
    weights."""


class FetchFailed(msgspec.Struct, frozen=True, tag="fetch_failed"):
    """An adapter could not be fetched. Requests that wait for it fail with `error`."""

    digest: str
    error: WireError


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """An adapter's files are about to be deleted."""

    digest: str


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Load a fetched adapter before any request needs it, and pin it if asked."""

    digest: str
    pin: bool


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Release a pin."""

    digest: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload"):
    """Free an adapter as soon as no request uses it."""

    digest: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for a sign of life; any StepOutput is one."""


Command = (
    Submit | Cancel | AdapterFetched | FetchFailed | Gone | Prefetch | Unpin | UnloadAdapter | Ping
)


class StepInput(msgspec.Struct, frozen=True, array_like=True):
    """Commands since the last StepInput, in order."""

    commands: list[Command]


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    info: ModelInfo
    total_blocks: int
    block_bytes: int
    layout: AdapterLayout
    """The layout for which adapters are packed."""
    max_lora_bytes: int
    """Most bytes of the arena for adapters."""


class EngineRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The model cannot be served with this configuration; trying again would not help."""

    error: WireError


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that one step added to one request."""

    request_id: str
    token_ids: list[int]
    """Empty if the step computed a part of a prompt whose experts are returned."""
    output_position: int
    """Position in the output of the first of `token_ids`."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: PackedLogprobs | None = None
    """Set in the first output."""
    cached_tokens: int = 0
    timings: Timings | None = None
    """Set in the last output."""
    pooled: list[float] = []
    routed_experts: RoutedExperts | None = None


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A request that has failed and gets no further output."""

    request_id: str
    error: WireError


class ResidencyChange(msgspec.Struct, frozen=True, array_like=True):
    """Where one adapter is now."""

    residency: AdapterResidency
    error: WireError | None = None
    """Why the adapter could not be loaded; None = no failure."""


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """Sent before the first step of these requests: if the engine dies, they were part of that
    step."""

    request_ids: list[str]


class PrefetchCopied(msgspec.Struct, frozen=True, tag="prefetch_copied"):
    """An adapter that was asked for with `Prefetch` can be used in the next step. Sent while the
    step before may still run, after which a `StepOutput` says so, too."""

    digest: str
    device_bytes: int


class StepOutput(msgspec.Struct, frozen=True, tag="output"):
    """The results of one step."""

    step: int
    tokens: list[TokenOutput]
    failures: list[Failure]
    residency: list[ResidencyChange]
    load: WorkerLoad
    copies_s: list[float] = []
    """Duration in seconds of each copy of an adapter to the device."""
    drafted: int = 0
    """Number of drafts that the step verified."""
    accepted: int = 0
    """Number of those that the sampler chose as well."""
    preemptions: int = 0
    """Number of requests that have been preempted since the engine started."""
    layer_stall_s: float = 0.0
    """Seconds for which steps have waited for copies of adapters since the engine started."""


EngineMessage = EngineReady | EngineRefused | Entered | PrefetchCopied | StepOutput

_encoder = msgspec.msgpack.Encoder()
decode_config = msgspec.msgpack.Decoder(EngineConfig).decode
decode_input = msgspec.msgpack.Decoder(StepInput).decode
decode_message: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of a message on the wire."""
    body = _encoder.encode(message)
    assert len(body) <= MAX_FRAME_BYTES, f"{type(message).__name__} of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Sequence[bytes]:
        """Add received bytes. Returns the bodies that are complete now."""
        self._data += data
        bodies: list[bytes] = []
        start = 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            assert length <= MAX_FRAME_BYTES, f"a frame of {length} bytes"
            end = start + _LENGTH.size + length
            if len(self._data) < end:
                break
            bodies.append(bytes(self._data[start + _LENGTH.size : end]))
            start = end
        del self._data[:start]
        return bodies
