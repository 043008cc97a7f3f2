from loraplex.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Visibility(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VISIBILITY_UNSPECIFIED: _ClassVar[Visibility]
    VISIBILITY_PRIVATE: _ClassVar[Visibility]
    VISIBILITY_SHARED: _ClassVar[Visibility]
    VISIBILITY_PUBLIC: _ClassVar[Visibility]
VISIBILITY_UNSPECIFIED: Visibility
VISIBILITY_PRIVATE: Visibility
VISIBILITY_SHARED: Visibility
VISIBILITY_PUBLIC: Visibility

class FileSpec(_message.Message):
    __slots__ = ("path", "size", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size: int
    sha256: str
    def __init__(self, path: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class PublishOptions(_message.Message):
    __slots__ = ("name", "tags", "no_latest", "base_id", "visibility", "labels", "strict", "parent", "when_loaded_s", "signatures", "allow_missing", "keep_versions", "ttl_s")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    NO_LATEST_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    WHEN_LOADED_S_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    KEEP_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    no_latest: bool
    base_id: str
    visibility: Visibility
    labels: _containers.ScalarMap[str, str]
    strict: bool
    parent: str
    when_loaded_s: float
    signatures: _containers.RepeatedCompositeFieldContainer[Signature]
    allow_missing: bool
    keep_versions: int
    ttl_s: float
    def __init__(self, name: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ..., no_latest: bool = ..., base_id: _Optional[str] = ..., visibility: _Optional[_Union[Visibility, str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., strict: bool = ..., parent: _Optional[str] = ..., when_loaded_s: _Optional[float] = ..., signatures: _Optional[_Iterable[_Union[Signature, _Mapping]]] = ..., allow_missing: bool = ..., keep_versions: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class CreateUploadRequest(_message.Message):
    __slots__ = ("options", "files")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    options: PublishOptions
    files: _containers.RepeatedCompositeFieldContainer[FileSpec]
    def __init__(self, options: _Optional[_Union[PublishOptions, _Mapping]] = ..., files: _Optional[_Iterable[_Union[FileSpec, _Mapping]]] = ...) -> None: ...

class FileProgress(_message.Message):
    __slots__ = ("path", "committed_bytes", "complete")
    PATH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    path: str
    committed_bytes: int
    complete: bool
    def __init__(self, path: _Optional[str] = ..., committed_bytes: _Optional[int] = ..., complete: bool = ...) -> None: ...

class CreateUploadResponse(_message.Message):
    __slots__ = ("upload_id", "progress")
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    progress: _containers.RepeatedCompositeFieldContainer[FileProgress]
    def __init__(self, upload_id: _Optional[str] = ..., progress: _Optional[_Iterable[_Union[FileProgress, _Mapping]]] = ...) -> None: ...

class UploadPartRequest(_message.Message):
    __slots__ = ("upload_id", "path", "offset", "data", "crc32")
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    path: str
    offset: int
    data: bytes
    crc32: int
    def __init__(self, upload_id: _Optional[str] = ..., path: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class UploadPartResponse(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: FileProgress
    def __init__(self, progress: _Optional[_Union[FileProgress, _Mapping]] = ...) -> None: ...

class GetUploadRequest(_message.Message):
    __slots__ = ("upload_id",)
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    def __init__(self, upload_id: _Optional[str] = ...) -> None: ...

class GetUploadResponse(_message.Message):
    __slots__ = ("upload_id", "progress", "finished")
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    progress: _containers.RepeatedCompositeFieldContainer[FileProgress]
    finished: AdapterVersion
    def __init__(self, upload_id: _Optional[str] = ..., progress: _Optional[_Iterable[_Union[FileProgress, _Mapping]]] = ..., finished: _Optional[_Union[AdapterVersion, _Mapping]] = ...) -> None: ...

class FinishUploadRequest(_message.Message):
    __slots__ = ("upload_id",)
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    def __init__(self, upload_id: _Optional[str] = ...) -> None: ...

class FinishUploadResponse(_message.Message):
    __slots__ = ("version", "created", "warnings")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    created: bool
    warnings: _containers.RepeatedCompositeFieldContainer[_common_pb2.FieldViolation]
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., created: bool = ..., warnings: _Optional[_Iterable[_Union[_common_pb2.FieldViolation, _Mapping]]] = ...) -> None: ...

class PublishAdapterRequest(_message.Message):
    __slots__ = ("options", "files", "request_id", "data")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    options: PublishOptions
    files: _containers.RepeatedCompositeFieldContainer[FileSpec]
    request_id: str
    data: bytes
    def __init__(self, options: _Optional[_Union[PublishOptions, _Mapping]] = ..., files: _Optional[_Iterable[_Union[FileSpec, _Mapping]]] = ..., request_id: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class PublishAdapterResponse(_message.Message):
    __slots__ = ("version", "created", "warnings")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    created: bool
    warnings: _containers.RepeatedCompositeFieldContainer[_common_pb2.FieldViolation]
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., created: bool = ..., warnings: _Optional[_Iterable[_Union[_common_pb2.FieldViolation, _Mapping]]] = ...) -> None: ...

class ValidateAdapterRequest(_message.Message):
    __slots__ = ("options", "files", "adapter_config_json", "safetensors_header")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    SAFETENSORS_HEADER_FIELD_NUMBER: _ClassVar[int]
    options: PublishOptions
    files: _containers.RepeatedCompositeFieldContainer[FileSpec]
    adapter_config_json: bytes
    safetensors_header: bytes
    def __init__(self, options: _Optional[_Union[PublishOptions, _Mapping]] = ..., files: _Optional[_Iterable[_Union[FileSpec, _Mapping]]] = ..., adapter_config_json: _Optional[bytes] = ..., safetensors_header: _Optional[bytes] = ...) -> None: ...

class ValidateAdapterResponse(_message.Message):
    __slots__ = ("warnings", "base_id", "max_rank")
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    warnings: _containers.RepeatedCompositeFieldContainer[_common_pb2.FieldViolation]
    base_id: str
    max_rank: int
    def __init__(self, warnings: _Optional[_Iterable[_Union[_common_pb2.FieldViolation, _Mapping]]] = ..., base_id: _Optional[str] = ..., max_rank: _Optional[int] = ...) -> None: ...

class AdapterVersion(_message.Message):
    __slots__ = ("tenant", "name", "version", "digest", "base_id", "base_fingerprint", "created_unix_s", "creator", "labels", "parent", "files", "max_rank", "num_modules", "warnings", "deleted", "tags", "visibility", "size_bytes", "shared_with", "peft_version", "signers", "pullable", "pooling", "rope_scaling", "eos_token_ids", "expires_unix_s", "description", "adapter_labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AdapterLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CREATOR_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_MODULES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    PEFT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIGNERS_FIELD_NUMBER: _ClassVar[int]
    PULLABLE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ROPE_SCALING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LABELS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    version: int
    digest: str
    base_id: str
    base_fingerprint: str
    created_unix_s: float
    creator: str
    labels: _containers.ScalarMap[str, str]
    parent: str
    files: _containers.RepeatedCompositeFieldContainer[FileSpec]
    max_rank: int
    num_modules: int
    warnings: _containers.RepeatedCompositeFieldContainer[_common_pb2.FieldViolation]
    deleted: bool
    tags: _containers.RepeatedScalarFieldContainer[str]
    visibility: Visibility
    size_bytes: int
    shared_with: _containers.RepeatedScalarFieldContainer[str]
    peft_version: str
    signers: _containers.RepeatedScalarFieldContainer[str]
    pullable: bool
    pooling: AdapterPooling
    rope_scaling: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    expires_unix_s: float
    description: str
    adapter_labels: _containers.ScalarMap[str, str]
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., base_id: _Optional[str] = ..., base_fingerprint: _Optional[str] = ..., created_unix_s: _Optional[float] = ..., creator: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., parent: _Optional[str] = ..., files: _Optional[_Iterable[_Union[FileSpec, _Mapping]]] = ..., max_rank: _Optional[int] = ..., num_modules: _Optional[int] = ..., warnings: _Optional[_Iterable[_Union[_common_pb2.FieldViolation, _Mapping]]] = ..., deleted: bool = ..., tags: _Optional[_Iterable[str]] = ..., visibility: _Optional[_Union[Visibility, str]] = ..., size_bytes: _Optional[int] = ..., shared_with: _Optional[_Iterable[str]] = ..., peft_version: _Optional[str] = ..., signers: _Optional[_Iterable[str]] = ..., pullable: bool = ..., pooling: _Optional[_Union[AdapterPooling, _Mapping]] = ..., rope_scaling: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., expires_unix_s: _Optional[float] = ..., description: _Optional[str] = ..., adapter_labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AdapterPooling(_message.Message):
    __slots__ = ("task_type", "num_labels", "labels", "problem_type", "pad_token_id", "pooling", "normalize")
    TASK_TYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LABELS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAD_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    task_type: str
    num_labels: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    problem_type: str
    pad_token_id: int
    pooling: _common_pb2.Pooling
    normalize: bool
    def __init__(self, task_type: _Optional[str] = ..., num_labels: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., problem_type: _Optional[str] = ..., pad_token_id: _Optional[int] = ..., pooling: _Optional[_Union[_common_pb2.Pooling, str]] = ..., normalize: bool = ...) -> None: ...

class TagTarget(_message.Message):
    __slots__ = ("version", "digest", "weight")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    weight: int
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class Tag(_message.Message):
    __slots__ = ("tenant", "name", "tag", "targets", "generation", "updated_unix_s", "pending", "pending_reason", "pending_until_unix_s", "pending_left_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UPDATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    PENDING_REASON_FIELD_NUMBER: _ClassVar[int]
    PENDING_UNTIL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    PENDING_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    tag: str
    targets: _containers.RepeatedCompositeFieldContainer[TagTarget]
    generation: int
    updated_unix_s: float
    pending: _containers.RepeatedCompositeFieldContainer[TagTarget]
    pending_reason: str
    pending_until_unix_s: float
    pending_left_s: float
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ..., tag: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[TagTarget, _Mapping]]] = ..., generation: _Optional[int] = ..., updated_unix_s: _Optional[float] = ..., pending: _Optional[_Iterable[_Union[TagTarget, _Mapping]]] = ..., pending_reason: _Optional[str] = ..., pending_until_unix_s: _Optional[float] = ..., pending_left_s: _Optional[float] = ...) -> None: ...

class GetAdapterRequest(_message.Message):
    __slots__ = ("ref", "split_key", "base_ids")
    REF_FIELD_NUMBER: _ClassVar[int]
    SPLIT_KEY_FIELD_NUMBER: _ClassVar[int]
    BASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ref: str
    split_key: str
    base_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ref: _Optional[str] = ..., split_key: _Optional[str] = ..., base_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetAdapterResponse(_message.Message):
    __slots__ = ("version", "tags")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    tags: _containers.RepeatedCompositeFieldContainer[Tag]
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., tags: _Optional[_Iterable[_Union[Tag, _Mapping]]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "tenant", "name_prefix", "labels", "all_versions", "base_id", "name")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ALL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    tenant: str
    name_prefix: str
    labels: _containers.ScalarMap[str, str]
    all_versions: bool
    base_id: str
    name: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., tenant: _Optional[str] = ..., name_prefix: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., all_versions: bool = ..., base_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("versions", "next_page_token")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[AdapterVersion]
    next_page_token: str
    def __init__(self, versions: _Optional[_Iterable[_Union[AdapterVersion, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SetTagRequest(_message.Message):
    __slots__ = ("name", "tag", "targets", "expect", "delete", "rollback", "rollback_version", "when_loaded_s", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_VERSION_FIELD_NUMBER: _ClassVar[int]
    WHEN_LOADED_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    tag: str
    targets: _containers.RepeatedCompositeFieldContainer[TagTarget]
    expect: str
    delete: bool
    rollback: bool
    rollback_version: int
    when_loaded_s: float
    reason: str
    def __init__(self, name: _Optional[str] = ..., tag: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[TagTarget, _Mapping]]] = ..., expect: _Optional[str] = ..., delete: bool = ..., rollback: bool = ..., rollback_version: _Optional[int] = ..., when_loaded_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class SetTagResponse(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: Tag
    def __init__(self, tag: _Optional[_Union[Tag, _Mapping]] = ...) -> None: ...

class ListTagHistoryRequest(_message.Message):
    __slots__ = ("name", "tag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    tag: str
    def __init__(self, name: _Optional[str] = ..., tag: _Optional[str] = ...) -> None: ...

class TagMove(_message.Message):
    __slots__ = ("generation", "targets", "moved_unix_s", "mover", "name")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    MOVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MOVER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    generation: int
    targets: _containers.RepeatedCompositeFieldContainer[TagTarget]
    moved_unix_s: float
    mover: str
    name: str
    def __init__(self, generation: _Optional[int] = ..., targets: _Optional[_Iterable[_Union[TagTarget, _Mapping]]] = ..., moved_unix_s: _Optional[float] = ..., mover: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ListTagHistoryResponse(_message.Message):
    __slots__ = ("moves",)
    MOVES_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[TagMove]
    def __init__(self, moves: _Optional[_Iterable[_Union[TagMove, _Mapping]]] = ...) -> None: ...

class DeleteAdapterVersionRequest(_message.Message):
    __slots__ = ("ref", "all", "force", "purge")
    REF_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    PURGE_FIELD_NUMBER: _ClassVar[int]
    ref: str
    all: bool
    force: bool
    purge: bool
    def __init__(self, ref: _Optional[str] = ..., all: bool = ..., force: bool = ..., purge: bool = ...) -> None: ...

class DeleteAdapterVersionResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: _containers.RepeatedCompositeFieldContainer[AdapterVersion]
    def __init__(self, deleted: _Optional[_Iterable[_Union[AdapterVersion, _Mapping]]] = ...) -> None: ...

class DownloadAdapterRequest(_message.Message):
    __slots__ = ("ref", "paths", "reader_verifies")
    REF_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    READER_VERIFIES_FIELD_NUMBER: _ClassVar[int]
    ref: str
    paths: _containers.RepeatedScalarFieldContainer[str]
    reader_verifies: bool
    def __init__(self, ref: _Optional[str] = ..., paths: _Optional[_Iterable[str]] = ..., reader_verifies: bool = ...) -> None: ...

class DownloadAdapterResponse(_message.Message):
    __slots__ = ("version", "chunk")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    chunk: FileChunk
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., chunk: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("path", "offset", "data")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    data: bytes
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WatchAdaptersRequest(_message.Message):
    __slots__ = ("resume_token",)
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    def __init__(self, resume_token: _Optional[str] = ...) -> None: ...

class AdapterEvent(_message.Message):
    __slots__ = ("version", "tag", "base")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    tag: Tag
    base: Base
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., tag: _Optional[_Union[Tag, _Mapping]] = ..., base: _Optional[_Union[Base, _Mapping]] = ...) -> None: ...

class WatchAdaptersResponse(_message.Message):
    __slots__ = ("events", "resume_token", "snapshot_begin", "snapshot_end")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[AdapterEvent]
    resume_token: str
    snapshot_begin: bool
    snapshot_end: bool
    def __init__(self, events: _Optional[_Iterable[_Union[AdapterEvent, _Mapping]]] = ..., resume_token: _Optional[str] = ..., snapshot_begin: bool = ..., snapshot_end: bool = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("base_id", "geometry", "aliases", "max_lora_rank")
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    base_id: str
    geometry: _common_pb2.ModelGeometry
    aliases: _containers.RepeatedScalarFieldContainer[str]
    max_lora_rank: int
    def __init__(self, base_id: _Optional[str] = ..., geometry: _Optional[_Union[_common_pb2.ModelGeometry, _Mapping]] = ..., aliases: _Optional[_Iterable[str]] = ..., max_lora_rank: _Optional[int] = ...) -> None: ...

class RegisterBaseRequest(_message.Message):
    __slots__ = ("base", "replace")
    BASE_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    base: Base
    replace: bool
    def __init__(self, base: _Optional[_Union[Base, _Mapping]] = ..., replace: bool = ...) -> None: ...

class RegisterBaseResponse(_message.Message):
    __slots__ = ("base",)
    BASE_FIELD_NUMBER: _ClassVar[int]
    base: Base
    def __init__(self, base: _Optional[_Union[Base, _Mapping]] = ...) -> None: ...

class ListBasesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBasesResponse(_message.Message):
    __slots__ = ("bases",)
    BASES_FIELD_NUMBER: _ClassVar[int]
    bases: _containers.RepeatedCompositeFieldContainer[Base]
    def __init__(self, bases: _Optional[_Iterable[_Union[Base, _Mapping]]] = ...) -> None: ...

class CollectGarbageRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: bool = ...) -> None: ...

class CollectGarbageResponse(_message.Message):
    __slots__ = ("deleted_objects", "deleted_bytes", "kept_objects")
    DELETED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DELETED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    deleted_objects: int
    deleted_bytes: int
    kept_objects: int
    def __init__(self, deleted_objects: _Optional[int] = ..., deleted_bytes: _Optional[int] = ..., kept_objects: _Optional[int] = ...) -> None: ...

class ReindexRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReindexResponse(_message.Message):
    __slots__ = ("versions", "tags", "bases", "epoch")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    versions: int
    tags: int
    bases: int
    epoch: str
    def __init__(self, versions: _Optional[int] = ..., tags: _Optional[int] = ..., bases: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("time_unix_s", "actor", "tenant", "action", "subject", "digest", "details")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TIME_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    time_unix_s: float
    actor: str
    tenant: str
    action: str
    subject: str
    digest: str
    details: _containers.ScalarMap[str, str]
    def __init__(self, time_unix_s: _Optional[float] = ..., actor: _Optional[str] = ..., tenant: _Optional[str] = ..., action: _Optional[str] = ..., subject: _Optional[str] = ..., digest: _Optional[str] = ..., details: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListAuditRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "tenant")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    tenant: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListAuditResponse(_message.Message):
    __slots__ = ("entries", "next_page_token")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    next_page_token: str
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Key(_message.Message):
    __slots__ = ("key_id", "tenant", "scopes", "created_unix_s", "expires_unix_s", "revoked", "description")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    tenant: str
    scopes: _containers.RepeatedScalarFieldContainer[str]
    created_unix_s: float
    expires_unix_s: float
    revoked: bool
    description: str
    def __init__(self, key_id: _Optional[str] = ..., tenant: _Optional[str] = ..., scopes: _Optional[_Iterable[str]] = ..., created_unix_s: _Optional[float] = ..., expires_unix_s: _Optional[float] = ..., revoked: bool = ..., description: _Optional[str] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("tenant", "scopes", "ttl_s", "description")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    scopes: _containers.RepeatedScalarFieldContainer[str]
    ttl_s: float
    description: str
    def __init__(self, tenant: _Optional[str] = ..., scopes: _Optional[_Iterable[str]] = ..., ttl_s: _Optional[float] = ..., description: _Optional[str] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("key", "token")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    key: Key
    token: str
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class CreateFirstKeyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateFirstKeyResponse(_message.Message):
    __slots__ = ("key", "token")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    key: Key
    token: str
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("tenant", "page_size", "page_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    page_size: int
    page_token: str
    def __init__(self, tenant: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keys", "next_page_token")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Key]
    next_page_token: str
    def __init__(self, keys: _Optional[_Iterable[_Union[Key, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("key_id",)
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    def __init__(self, key_id: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("tenant", "max_bytes", "max_versions", "used_bytes", "used_versions", "requests_per_s", "tokens_per_s", "max_concurrent", "fairness_weight", "signature_keys", "max_kl")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    FAIRNESS_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_KL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    max_bytes: int
    max_versions: int
    used_bytes: int
    used_versions: int
    requests_per_s: float
    tokens_per_s: float
    max_concurrent: int
    fairness_weight: float
    signature_keys: _containers.RepeatedScalarFieldContainer[str]
    max_kl: float
    def __init__(self, tenant: _Optional[str] = ..., max_bytes: _Optional[int] = ..., max_versions: _Optional[int] = ..., used_bytes: _Optional[int] = ..., used_versions: _Optional[int] = ..., requests_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., max_concurrent: _Optional[int] = ..., fairness_weight: _Optional[float] = ..., signature_keys: _Optional[_Iterable[str]] = ..., max_kl: _Optional[float] = ...) -> None: ...

class SetTenantRequest(_message.Message):
    __slots__ = ("tenant", "fields")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., fields: _Optional[_Iterable[str]] = ...) -> None: ...

class SetTenantResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ...) -> None: ...

class SetSharingRequest(_message.Message):
    __slots__ = ("name", "visibility", "shared_with", "pullable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    PULLABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    visibility: Visibility
    shared_with: _containers.RepeatedScalarFieldContainer[str]
    pullable: bool
    def __init__(self, name: _Optional[str] = ..., visibility: _Optional[_Union[Visibility, str]] = ..., shared_with: _Optional[_Iterable[str]] = ..., pullable: bool = ...) -> None: ...

class SetSharingResponse(_message.Message):
    __slots__ = ("visibility", "shared_with", "pullable")
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    PULLABLE_FIELD_NUMBER: _ClassVar[int]
    visibility: Visibility
    shared_with: _containers.RepeatedScalarFieldContainer[str]
    pullable: bool
    def __init__(self, visibility: _Optional[_Union[Visibility, str]] = ..., shared_with: _Optional[_Iterable[str]] = ..., pullable: bool = ...) -> None: ...

class DescribeAdapterRequest(_message.Message):
    __slots__ = ("name", "description", "set_labels", "remove_labels")
    class SetLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SET_LABELS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_LABELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    set_labels: _containers.ScalarMap[str, str]
    remove_labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., set_labels: _Optional[_Mapping[str, str]] = ..., remove_labels: _Optional[_Iterable[str]] = ...) -> None: ...

class DescribeAdapterResponse(_message.Message):
    __slots__ = ("description", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    description: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, description: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Signature(_message.Message):
    __slots__ = ("key_sha256", "bundle", "public_key", "verified")
    KEY_SHA256_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    key_sha256: str
    bundle: bytes
    public_key: str
    verified: bool
    def __init__(self, key_sha256: _Optional[str] = ..., bundle: _Optional[bytes] = ..., public_key: _Optional[str] = ..., verified: bool = ...) -> None: ...

class AttachSignatureRequest(_message.Message):
    __slots__ = ("ref", "bundle", "public_key")
    REF_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ref: str
    bundle: bytes
    public_key: str
    def __init__(self, ref: _Optional[str] = ..., bundle: _Optional[bytes] = ..., public_key: _Optional[str] = ...) -> None: ...

class AttachSignatureResponse(_message.Message):
    __slots__ = ("version", "signature")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    signature: Signature
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., signature: _Optional[_Union[Signature, _Mapping]] = ...) -> None: ...

class ListSignaturesRequest(_message.Message):
    __slots__ = ("ref",)
    REF_FIELD_NUMBER: _ClassVar[int]
    ref: str
    def __init__(self, ref: _Optional[str] = ...) -> None: ...

class ListSignaturesResponse(_message.Message):
    __slots__ = ("version", "signatures", "policy_keys")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    POLICY_KEYS_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    signatures: _containers.RepeatedCompositeFieldContainer[Signature]
    policy_keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., signatures: _Optional[_Iterable[_Union[Signature, _Mapping]]] = ..., policy_keys: _Optional[_Iterable[str]] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("base_id", "reference", "probe_sha256", "num_tokens", "mean_kl", "max_kl", "top1_agreement", "created_unix_s", "creator", "quantization", "by_operator")
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    PROBE_SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_KL_FIELD_NUMBER: _ClassVar[int]
    MAX_KL_FIELD_NUMBER: _ClassVar[int]
    TOP1_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CREATOR_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    BY_OPERATOR_FIELD_NUMBER: _ClassVar[int]
    base_id: str
    reference: str
    probe_sha256: str
    num_tokens: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    created_unix_s: float
    creator: str
    quantization: str
    by_operator: bool
    def __init__(self, base_id: _Optional[str] = ..., reference: _Optional[str] = ..., probe_sha256: _Optional[str] = ..., num_tokens: _Optional[int] = ..., mean_kl: _Optional[float] = ..., max_kl: _Optional[float] = ..., top1_agreement: _Optional[float] = ..., created_unix_s: _Optional[float] = ..., creator: _Optional[str] = ..., quantization: _Optional[str] = ..., by_operator: bool = ...) -> None: ...

class SetCertificateRequest(_message.Message):
    __slots__ = ("ref", "certificate")
    REF_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ref: str
    certificate: Certificate
    def __init__(self, ref: _Optional[str] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ...) -> None: ...

class SetCertificateResponse(_message.Message):
    __slots__ = ("version", "certificate")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    version: AdapterVersion
    certificate: Certificate
    def __init__(self, version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ...) -> None: ...

class ListCertificatesRequest(_message.Message):
    __slots__ = ("ref",)
    REF_FIELD_NUMBER: _ClassVar[int]
    ref: str
    def __init__(self, ref: _Optional[str] = ...) -> None: ...

class ListCertificatesResponse(_message.Message):
    __slots__ = ("certificates",)
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    certificates: _containers.RepeatedCompositeFieldContainer[Certificate]
    def __init__(self, certificates: _Optional[_Iterable[_Union[Certificate, _Mapping]]] = ...) -> None: ...

class CheckKeyRequest(_message.Message):
    __slots__ = ("token", "key_id")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    token: str
    key_id: str
    def __init__(self, token: _Optional[str] = ..., key_id: _Optional[str] = ...) -> None: ...

class CheckKeyResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ...) -> None: ...

class FinishStagedMoveRequest(_message.Message):
    __slots__ = ("name", "tag", "generation", "failure")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    tag: str
    generation: int
    failure: str
    def __init__(self, name: _Optional[str] = ..., tag: _Optional[str] = ..., generation: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class FinishStagedMoveResponse(_message.Message):
    __slots__ = ("tag",)
    TAG_FIELD_NUMBER: _ClassVar[int]
    tag: Tag
    def __init__(self, tag: _Optional[_Union[Tag, _Mapping]] = ...) -> None: ...

class UsageEntry(_message.Message):
    __slots__ = ("day", "tenant", "model", "requests", "errors", "prompt_tokens", "cached_tokens", "generated_tokens", "duration_ms")
    DAY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    day: str
    tenant: str
    model: str
    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    duration_ms: int
    def __init__(self, day: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., requests: _Optional[int] = ..., errors: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class RecordUsageRequest(_message.Message):
    __slots__ = ("report_id", "entries", "ephemeral_adapters")
    REPORT_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    report_id: str
    entries: _containers.RepeatedCompositeFieldContainer[UsageEntry]
    ephemeral_adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, report_id: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[UsageEntry, _Mapping]]] = ..., ephemeral_adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class RecordUsageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListUsageRequest(_message.Message):
    __slots__ = ("tenant", "all_tenants", "model", "since")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ALL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    all_tenants: bool
    model: str
    since: str
    def __init__(self, tenant: _Optional[str] = ..., all_tenants: bool = ..., model: _Optional[str] = ..., since: _Optional[str] = ...) -> None: ...

class ListUsageResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[UsageEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[UsageEntry, _Mapping]]] = ...) -> None: ...
