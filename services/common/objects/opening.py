"""`open_store(url)`: the store behind `LORAPLEX_OBJECTS`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from loraplex.errors import InvalidRequest
from loraplex_services.common.objects.store import ObjectStore, ObjectStoreError
from loraplex_services.common.settings.env import OBJECTS
from loraplex_services.common.units import parse_store_url


def open_store(url: str) -> ObjectStore:
    """Open `file:///path` or `s3://bucket/prefix`; the folder is created, the bucket is not.

    Raises:
        InvalidRequest: the URL has another form, the folder cannot be created, or the AWS variables
            or files cannot be used.
    """
    try:
        parts = urlsplit(parse_store_url(url))
    except ValueError as error:
        raise InvalidRequest.field(OBJECTS.name, url, str(error)) from None
    if parts.scheme == "s3":
        from botocore.exceptions import BotoCoreError

        from loraplex.sources.bucket import refused_settings
        from loraplex_services.common.objects.s3 import S3Store

        try:
            return S3Store(parts.netloc, unquote(parts.path).strip("/"))
        except (BotoCoreError, ValueError) as error:
            raise refused_settings(error) from error
    from loraplex_services.common.objects.file import FileStore

    try:
        return FileStore(Path(unquote(parts.path)))
    except ObjectStoreError as error:
        description = (
            f"the folder cannot be used: {error.message}; name one that this user may write to, "
            "or a bucket"
        )
        raise InvalidRequest.field(OBJECTS.name, url, description) from None
