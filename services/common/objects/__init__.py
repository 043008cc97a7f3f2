"""The object store that holds the persistent state of all services, behind one interface."""

from loraplex_services.common.objects.opening import open_store
from loraplex_services.common.objects.store import (
    After,
    BlobWriter,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    Segment,
    StoredObject,
    WriteUncertain,
    read_chunks,
)

__all__ = [
    "After",
    "BlobWriter",
    "ObjectInfo",
    "ObjectMissing",
    "ObjectStore",
    "ObjectStoreError",
    "PreconditionFailed",
    "Segment",
    "StoredObject",
    "WriteUncertain",
    "open_store",
    "read_chunks",
]
