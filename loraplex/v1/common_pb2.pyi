from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_HEAD: _ClassVar[Pooling]

class ModuleKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODULE_KIND_UNSPECIFIED: _ClassVar[ModuleKind]
    MODULE_KIND_LINEAR: _ClassVar[ModuleKind]
    MODULE_KIND_EMBEDDING: _ClassVar[ModuleKind]
    MODULE_KIND_LM_HEAD: _ClassVar[ModuleKind]
    MODULE_KIND_NORM: _ClassVar[ModuleKind]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ABORT: FinishReason
POOLING_UNSPECIFIED: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
POOLING_HEAD: Pooling
MODULE_KIND_UNSPECIFIED: ModuleKind
MODULE_KIND_LINEAR: ModuleKind
MODULE_KIND_EMBEDDING: ModuleKind
MODULE_KIND_LM_HEAD: ModuleKind
MODULE_KIND_NORM: ModuleKind

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "ebnf", "choice")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    ebnf: str
    choice: GrammarChoice
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., choice: _Optional[_Union[GrammarChoice, _Mapping]] = ...) -> None: ...

class GrammarChoice(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, options: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenCandidate(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "top", "rank")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token: TokenCandidate
    top: _containers.RepeatedCompositeFieldContainer[TokenCandidate]
    rank: int
    def __init__(self, token: _Optional[_Union[TokenCandidate, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenCandidate, _Mapping]]] = ..., rank: _Optional[int] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("start", "num_layers", "num_active", "expert_bytes", "experts")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_layers: int
    num_active: int
    expert_bytes: int
    experts: bytes
    def __init__(self, start: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_active: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., experts: _Optional[bytes] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_s", "load_s", "prefill_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    load_s: float
    prefill_s: float
    def __init__(self, queue_s: _Optional[float] = ..., load_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class FieldViolation(_message.Message):
    __slots__ = ("field", "value", "description")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    field: str
    value: str
    description: str
    def __init__(self, field: _Optional[str] = ..., value: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "reason", "message", "violations", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    violations: _containers.RepeatedCompositeFieldContainer[FieldViolation]
    retry_after_s: float
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., violations: _Optional[_Iterable[_Union[FieldViolation, _Mapping]]] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class ModelGeometry(_message.Message):
    __slots__ = ("model_type", "fingerprint", "num_layers", "vocab_size", "tied_embeddings", "modules", "weights_sha256", "rotary_pairs")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TIED_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    ROTARY_PAIRS_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    fingerprint: str
    num_layers: int
    vocab_size: int
    tied_embeddings: bool
    modules: _containers.RepeatedCompositeFieldContainer[ModuleGeometry]
    weights_sha256: str
    rotary_pairs: int
    def __init__(self, model_type: _Optional[str] = ..., fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tied_embeddings: bool = ..., modules: _Optional[_Iterable[_Union[ModuleGeometry, _Mapping]]] = ..., weights_sha256: _Optional[str] = ..., rotary_pairs: _Optional[int] = ...) -> None: ...

class ModuleGeometry(_message.Message):
    __slots__ = ("name", "kind", "in_features", "out_features", "has_bias", "is_fixed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IN_FEATURES_FIELD_NUMBER: _ClassVar[int]
    OUT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    HAS_BIAS_FIELD_NUMBER: _ClassVar[int]
    IS_FIXED_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: ModuleKind
    in_features: int
    out_features: int
    has_bias: bool
    is_fixed: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[ModuleKind, str]] = ..., in_features: _Optional[int] = ..., out_features: _Optional[int] = ..., has_bias: bool = ..., is_fixed: bool = ...) -> None: ...
