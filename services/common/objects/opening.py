"""`open_store(url)`: the store behind `LORAPLEX_OBJECTS`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from loraplex.errors import InvalidRequest
from loraplex_services.common.objects.store import ObjectStore


def open_store(url: str) -> ObjectStore:
    """Open `file:///path` or `s3://bucket/prefix`; the folder is created, the bucket is not.

    Raises:
        InvalidRequest: the URL has another form.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path != "/":
        from loraplex_services.common.objects.file import FileStore

        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        from loraplex_services.common.objects.s3 import S3Store

        return S3Store(parts.netloc, unquote(parts.path).strip("/"))
    raise InvalidRequest.field(
        "LORAPLEX_OBJECTS", url, "must be file:///absolute/path or s3://bucket/prefix"
    )
