from loraplex.v1 import inference_pb2 as _inference_pb2
from loraplex.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ("include_adapters",)
    INCLUDE_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    include_adapters: bool
    def __init__(self, include_adapters: bool = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("ready", "not_ready_reason", "base_ids", "workers", "registry_connected", "num_adapters", "running_requests", "queued_requests", "recent")
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    BASE_IDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    not_ready_reason: str
    base_ids: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    registry_connected: bool
    num_adapters: int
    running_requests: int
    queued_requests: int
    recent: RecentLoad
    def __init__(self, ready: bool = ..., not_ready_reason: _Optional[str] = ..., base_ids: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., registry_connected: bool = ..., num_adapters: _Optional[int] = ..., running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., recent: _Optional[_Union[RecentLoad, _Mapping]] = ...) -> None: ...

class RecentLoad(_message.Message):
    __slots__ = ("window_s", "requests", "failures", "prompt_tokens", "generated_tokens", "first_token_p50_s", "first_token_p95_s", "duration_p50_s", "duration_p95_s", "models")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_P50_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_P95_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_P50_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_P95_S_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    requests: int
    failures: _containers.ScalarMap[str, int]
    prompt_tokens: int
    generated_tokens: int
    first_token_p50_s: float
    first_token_p95_s: float
    duration_p50_s: float
    duration_p95_s: float
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    def __init__(self, window_s: _Optional[float] = ..., requests: _Optional[int] = ..., failures: _Optional[_Mapping[str, int]] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., first_token_p50_s: _Optional[float] = ..., first_token_p95_s: _Optional[float] = ..., duration_p50_s: _Optional[float] = ..., duration_p95_s: _Optional[float] = ..., models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("model", "requests", "errors", "generated_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    requests: int
    errors: int
    generated_tokens: int
    def __init__(self, model: _Optional[str] = ..., requests: _Optional[int] = ..., errors: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("worker_id", "address", "base_id", "connected", "ready", "draining", "load", "adapters", "num_adapters_on_device", "dtype", "kernels", "quantization")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    base_id: str
    connected: bool
    ready: bool
    draining: bool
    load: _worker_pb2.WorkerLoad
    adapters: _containers.RepeatedCompositeFieldContainer[ResidentAdapter]
    num_adapters_on_device: int
    dtype: str
    kernels: str
    quantization: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., base_id: _Optional[str] = ..., connected: bool = ..., ready: bool = ..., draining: bool = ..., load: _Optional[_Union[_worker_pb2.WorkerLoad, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[ResidentAdapter, _Mapping]]] = ..., num_adapters_on_device: _Optional[int] = ..., dtype: _Optional[str] = ..., kernels: _Optional[str] = ..., quantization: _Optional[str] = ...) -> None: ...

class ResidentAdapter(_message.Message):
    __slots__ = ("ref", "residency", "num_other_refs")
    REF_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_REFS_FIELD_NUMBER: _ClassVar[int]
    ref: str
    residency: _worker_pb2.AdapterResidency
    num_other_refs: int
    def __init__(self, ref: _Optional[str] = ..., residency: _Optional[_Union[_worker_pb2.AdapterResidency, _Mapping]] = ..., num_other_refs: _Optional[int] = ...) -> None: ...

class FetchAdapterRequest(_message.Message):
    __slots__ = ("ref", "num_workers")
    REF_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ref: str
    num_workers: int
    def __init__(self, ref: _Optional[str] = ..., num_workers: _Optional[int] = ...) -> None: ...

class FetchAdapterResponse(_message.Message):
    __slots__ = ("ref", "digest", "worker_ids", "took_s")
    REF_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    ref: str
    digest: str
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    took_s: float
    def __init__(self, ref: _Optional[str] = ..., digest: _Optional[str] = ..., worker_ids: _Optional[_Iterable[str]] = ..., took_s: _Optional[float] = ...) -> None: ...

class MirrorRequestsRequest(_message.Message):
    __slots__ = ("ref", "share")
    REF_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    ref: str
    share: float
    def __init__(self, ref: _Optional[str] = ..., share: _Optional[float] = ...) -> None: ...

class MirrorRequestsResponse(_message.Message):
    __slots__ = ("request", "prompt_text", "token_ids", "text", "digest")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.GenerateRequest
    prompt_text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    digest: str
    def __init__(self, request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., prompt_text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...
