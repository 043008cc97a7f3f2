"""Attention backends that other packages register as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from loraplex.errors import InvalidRequest
from loraplex_services.common.units import ATTENTION_GROUP
from loraplex_services.worker.ops.attention.backend import AttentionBackend


def registered_backend(name: str) -> type[AttentionBackend] | None:
    """The class that a package registers under a name; None if none does.

    Importing it runs the package's code, so only the name that the operator sets is looked up.

    Raises:
        InvalidRequest: several packages register the name, or it names no `AttentionBackend`.
    """
    found = tuple(entry_points(group=ATTENTION_GROUP, name=name))
    if not found:
        return None
    if len(found) > 1:
        packages = ", ".join(sorted(point.dist.name for point in found if point.dist))
        raise _refused(name, f"is registered by several packages: {packages}")
    [point] = found
    try:
        backend = point.load()
    except (ImportError, AttributeError) as error:
        raise _refused(name, f"is registered as {point.value}, which fails: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise _refused(name, f"is registered as {point.value}, which is not an AttentionBackend")
    return backend


def _refused(name: str, why: str) -> InvalidRequest:
    return InvalidRequest.field("attention_backend", name, why)
