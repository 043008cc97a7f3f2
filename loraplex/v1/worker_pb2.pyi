from loraplex.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdapterTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_TIER_UNSPECIFIED: _ClassVar[AdapterTier]
    ADAPTER_TIER_DISK: _ClassVar[AdapterTier]
    ADAPTER_TIER_LOADING: _ClassVar[AdapterTier]
    ADAPTER_TIER_DEVICE: _ClassVar[AdapterTier]
ADAPTER_TIER_UNSPECIFIED: AdapterTier
ADAPTER_TIER_DISK: AdapterTier
ADAPTER_TIER_LOADING: AdapterTier
ADAPTER_TIER_DEVICE: AdapterTier

class WorkerAdapter(_message.Message):
    __slots__ = ("digest", "weight")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    digest: str
    weight: float
    def __init__(self, digest: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class WorkerSampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "prompt_logprobs", "allowed_token_ids", "bad_token_ids", "logprob_token_ids", "bad_sequences")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    prompt_logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_token_ids: _Optional[_Iterable[int]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., bad_sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "priority", "fairness_weight", "cache_salt", "remaining_s", "trace", "prompt_ids", "output_ids", "adapters", "sampling", "sample_index", "grammar", "pooling", "grammar_tokens", "grammar_eos_ids", "remaining_first_token_s", "kept", "routed_from")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FAIRNESS_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FROM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    priority: int
    fairness_weight: float
    cache_salt: str
    remaining_s: float
    trace: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedCompositeFieldContainer[WorkerAdapter]
    sampling: WorkerSampling
    sample_index: int
    grammar: _common_pb2.Grammar
    pooling: _common_pb2.Pooling
    grammar_tokens: _containers.RepeatedCompositeFieldContainer[GrammarToken]
    grammar_eos_ids: _containers.RepeatedScalarFieldContainer[int]
    remaining_first_token_s: float
    kept: _containers.RepeatedCompositeFieldContainer[KeptPrefix]
    routed_from: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., fairness_weight: _Optional[float] = ..., cache_salt: _Optional[str] = ..., remaining_s: _Optional[float] = ..., trace: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[_Union[WorkerAdapter, _Mapping]]] = ..., sampling: _Optional[_Union[WorkerSampling, _Mapping]] = ..., sample_index: _Optional[int] = ..., grammar: _Optional[_Union[_common_pb2.Grammar, _Mapping]] = ..., pooling: _Optional[_Union[_common_pb2.Pooling, str]] = ..., grammar_tokens: _Optional[_Iterable[_Union[GrammarToken, _Mapping]]] = ..., grammar_eos_ids: _Optional[_Iterable[int]] = ..., remaining_first_token_s: _Optional[float] = ..., kept: _Optional[_Iterable[_Union[KeptPrefix, _Mapping]]] = ..., routed_from: _Optional[int] = ...) -> None: ...

class KeptPrefix(_message.Message):
    __slots__ = ("adapters", "num_tokens")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[WorkerAdapter]
    num_tokens: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[WorkerAdapter, _Mapping]]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class GrammarToken(_message.Message):
    __slots__ = ("token_id", "content")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    content: str
    def __init__(self, token_id: _Optional[int] = ..., content: _Optional[str] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "ack")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    submit: WorkerRequest
    cancel: SessionCancel
    ack: SessionAck
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., submit: _Optional[_Union[WorkerRequest, _Mapping]] = ..., cancel: _Optional[_Union[SessionCancel, _Mapping]] = ..., ack: _Optional[_Union[SessionAck, _Mapping]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("gateway_id",)
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    def __init__(self, gateway_id: _Optional[str] = ...) -> None: ...

class SessionCancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class SessionAck(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "events")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    welcome: SessionWelcome
    events: StepEvents
    def __init__(self, welcome: _Optional[_Union[SessionWelcome, _Mapping]] = ..., events: _Optional[_Union[StepEvents, _Mapping]] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("worker_id", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class StepEvents(_message.Message):
    __slots__ = ("step", "tokens", "failures")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    step: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    failures: _containers.RepeatedCompositeFieldContainer[RequestFailure]
    def __init__(self, step: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[RequestFailure, _Mapping]]] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("request_id", "token_ids", "output_position", "logprobs", "finish_reason", "stop_token_id", "cached_tokens", "timings", "pooled", "prompt_logprobs", "routed_experts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    finish_reason: _common_pb2.FinishReason
    stop_token_id: int
    cached_tokens: int
    timings: _common_pb2.Timings
    pooled: _containers.RepeatedScalarFieldContainer[float]
    prompt_logprobs: PackedLogprobs
    routed_experts: _common_pb2.RoutedExperts
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., output_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., pooled: _Optional[_Iterable[float]] = ..., prompt_logprobs: _Optional[_Union[PackedLogprobs, _Mapping]] = ..., routed_experts: _Optional[_Union[_common_pb2.RoutedExperts, _Mapping]] = ...) -> None: ...

class PackedLogprobs(_message.Message):
    __slots__ = ("num_top", "token_ids", "logprobs", "ranks")
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    num_top: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    def __init__(self, num_top: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ...) -> None: ...

class RequestFailure(_message.Message):
    __slots__ = ("request_id", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error: _common_pb2.ErrorDetail
    def __init__(self, request_id: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class WorkerServiceGenerateRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: WorkerRequest
    def __init__(self, request: _Optional[_Union[WorkerRequest, _Mapping]] = ...) -> None: ...

class WorkerServiceGenerateResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: TokenEvent
    def __init__(self, event: _Optional[_Union[TokenEvent, _Mapping]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterResidency(_message.Message):
    __slots__ = ("digest", "tier", "max_rank", "device_bytes", "pinned", "running_requests", "host_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    tier: AdapterTier
    max_rank: int
    device_bytes: int
    pinned: bool
    running_requests: int
    host_bytes: int
    def __init__(self, digest: _Optional[str] = ..., tier: _Optional[_Union[AdapterTier, str]] = ..., max_rank: _Optional[int] = ..., device_bytes: _Optional[int] = ..., pinned: bool = ..., running_requests: _Optional[int] = ..., host_bytes: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "queued_tokens", "free_blocks", "total_blocks", "step_s", "prefill_tokens_per_s", "max_distinct_adapters", "steps", "max_running_requests", "full", "idle_blocks")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_DISTINCT_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    IDLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    step_s: float
    prefill_tokens_per_s: float
    max_distinct_adapters: int
    steps: int
    max_running_requests: int
    full: bool
    idle_blocks: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., step_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., max_distinct_adapters: _Optional[int] = ..., steps: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., full: bool = ..., idle_blocks: _Optional[int] = ...) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("worker_id", "epoch", "sequence", "full", "ready", "draining", "load", "adapters", "base_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    sequence: int
    full: bool
    ready: bool
    draining: bool
    load: WorkerLoad
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterResidency]
    base_id: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., full: bool = ..., ready: bool = ..., draining: bool = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[AdapterResidency, _Mapping]]] = ..., base_id: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("include_tokenizer",)
    INCLUDE_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    include_tokenizer: bool
    def __init__(self, include_tokenizer: bool = ...) -> None: ...

class TokenizerFile(_message.Message):
    __slots__ = ("name", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("base_id", "geometry", "max_model_len", "vocab_size", "eos_token_ids", "bos_token_id", "max_lora_rank", "dtype", "device", "numerics_fingerprint", "tokenizer_digest", "tokenizer_files", "generation_config_json", "worker_id", "pad_token_id", "base_aliases", "kernels", "caps_context", "quantization", "routing_bytes")
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FILES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PAD_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_ALIASES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    CAPS_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ROUTING_BYTES_FIELD_NUMBER: _ClassVar[int]
    base_id: str
    geometry: _common_pb2.ModelGeometry
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    max_lora_rank: int
    dtype: str
    device: str
    numerics_fingerprint: str
    tokenizer_digest: str
    tokenizer_files: _containers.RepeatedCompositeFieldContainer[TokenizerFile]
    generation_config_json: str
    worker_id: str
    pad_token_id: int
    base_aliases: _containers.RepeatedScalarFieldContainer[str]
    kernels: str
    caps_context: bool
    quantization: str
    routing_bytes: int
    def __init__(self, base_id: _Optional[str] = ..., geometry: _Optional[_Union[_common_pb2.ModelGeometry, _Mapping]] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., numerics_fingerprint: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., tokenizer_files: _Optional[_Iterable[_Union[TokenizerFile, _Mapping]]] = ..., generation_config_json: _Optional[str] = ..., worker_id: _Optional[str] = ..., pad_token_id: _Optional[int] = ..., base_aliases: _Optional[_Iterable[str]] = ..., kernels: _Optional[str] = ..., caps_context: bool = ..., quantization: _Optional[str] = ..., routing_bytes: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("digest", "pin", "when_fetched")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    WHEN_FETCHED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    pin: bool
    when_fetched: bool
    def __init__(self, digest: _Optional[str] = ..., pin: bool = ..., when_fetched: bool = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("residency",)
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    residency: AdapterResidency
    def __init__(self, residency: _Optional[_Union[AdapterResidency, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinAdapterRequest(_message.Message):
    __slots__ = ("digest", "pinned")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    pinned: bool
    def __init__(self, digest: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class PinAdapterResponse(_message.Message):
    __slots__ = ("residency",)
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    residency: AdapterResidency
    def __init__(self, residency: _Optional[_Union[AdapterResidency, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running_requests",)
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    def __init__(self, running_requests: _Optional[int] = ...) -> None: ...
