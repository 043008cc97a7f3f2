"""Converts geometries, files and the pooling of adapters to and from messages."""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.adapter_format import geometry as kinds
from loraplex.adapter_format.files import File
from loraplex.adapter_format.geometry import Geometry, Module
from loraplex.adapter_format.pooling_fields import PoolingFields
from loraplex.adapter_format.tasks import CAUSAL_LM
from loraplex.api.pooling import Pooling
from loraplex.api.wire import from_message, pooling_from_proto, pooling_to_proto, to_message
from loraplex.errors import InvalidRequest
from loraplex.v1 import common_pb2, registry_pb2

_KINDS = {
    kinds.LINEAR: common_pb2.MODULE_KIND_LINEAR,
    kinds.EMBEDDING: common_pb2.MODULE_KIND_EMBEDDING,
    kinds.LM_HEAD: common_pb2.MODULE_KIND_LM_HEAD,
    kinds.NORM: common_pb2.MODULE_KIND_NORM,
}
_KIND_NAMES = {number: name for name, number in _KINDS.items()}


def geometry_to_proto(geometry: Geometry) -> common_pb2.ModelGeometry:
    """A geometry as a message."""
    modules = [
        to_message(module, common_pb2.ModuleGeometry, kind=_KINDS[module.kind])
        for module in geometry.modules
    ]
    return to_message(geometry, common_pb2.ModelGeometry, modules=modules)


def geometry_from_proto(message: common_pb2.ModelGeometry) -> Geometry:
    """A geometry from a message.

    Raises:
        InvalidRequest: no fingerprint, no modules, or a module of an unknown kind.
    """
    if not message.fingerprint:
        raise InvalidRequest.field("geometry.fingerprint", "", "must be set")
    if not message.modules:
        raise InvalidRequest.field("geometry.modules", "[]", "must list the base's modules")
    modules = tuple(_module_from_proto(module) for module in message.modules)
    return from_message(message, Geometry, modules=modules)


def _module_from_proto(message: common_pb2.ModuleGeometry) -> Module:
    kind = _KIND_NAMES.get(message.kind)
    if kind is None:
        path = f"geometry.modules.{message.name}.kind"
        raise InvalidRequest.field(
            path, int(message.kind), "is of a kind that this build does not know"
        )
    return from_message(message, Module, kind=kind)


def files_from_proto(messages: Iterable[registry_pb2.FileSpec]) -> tuple[File, ...]:
    """Files from messages."""
    return tuple(File(m.path, m.size, m.sha256) for m in messages)


def adapter_pooling_to_proto(task: str, fields: PoolingFields) -> registry_pb2.AdapterPooling:
    """How an adapter of a task answers requests for vectors and scores."""
    message = registry_pb2.AdapterPooling(
        task_type=task,
        num_labels=fields.num_labels,
        labels=fields.labels,
        problem_type=fields.problem_type,
        pad_token_id=fields.pad_token_id,
        pooling=pooling_to_proto(Pooling(fields.pooling)),
    )
    if fields.normalize is not None:
        message.normalize = fields.normalize
    return message


def adapter_pooling_from_proto(message: registry_pb2.AdapterPooling) -> tuple[str, PoolingFields]:
    """The inverse; an empty message is a causal model's."""
    fields = PoolingFields(
        labels=tuple(message.labels),
        num_labels=message.num_labels,
        problem_type=message.problem_type,
        pad_token_id=message.pad_token_id if message.HasField("pad_token_id") else None,
        pooling=(pooling_from_proto(message.pooling) or Pooling.NONE).value,
        normalize=message.normalize if message.HasField("normalize") else None,
    )
    return message.task_type or CAUSAL_LM, fields
