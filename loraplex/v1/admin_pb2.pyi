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
    __slots__ = ("ready", "not_ready_reason", "base_ids", "workers", "registry_connected", "num_adapters", "running_requests", "queued_requests")
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    BASE_IDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    not_ready_reason: str
    base_ids: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    registry_connected: bool
    num_adapters: int
    running_requests: int
    queued_requests: int
    def __init__(self, ready: bool = ..., not_ready_reason: _Optional[str] = ..., base_ids: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., registry_connected: bool = ..., num_adapters: _Optional[int] = ..., running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("worker_id", "address", "base_id", "connected", "ready", "draining", "load", "adapters", "num_adapters_on_device", "dtype", "kernels")
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
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., base_id: _Optional[str] = ..., connected: bool = ..., ready: bool = ..., draining: bool = ..., load: _Optional[_Union[_worker_pb2.WorkerLoad, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[ResidentAdapter, _Mapping]]] = ..., num_adapters_on_device: _Optional[int] = ..., dtype: _Optional[str] = ..., kernels: _Optional[str] = ...) -> None: ...

class ResidentAdapter(_message.Message):
    __slots__ = ("ref", "residency")
    REF_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    ref: str
    residency: _worker_pb2.AdapterResidency
    def __init__(self, ref: _Optional[str] = ..., residency: _Optional[_Union[_worker_pb2.AdapterResidency, _Mapping]] = ...) -> None: ...

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
