"""Adapters from an S3 bucket, with the environment variables and files that AWS tools read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.client.progress import Progress
from loraplex.errors import (
    DataLoss,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
    Violation,
)
from loraplex.sources.selection import select, write_bounded

MAX_OBJECTS = 10_000
_CHUNK_BYTES = 1 << 20


def fetch_from_bucket(
    address: str, folder: Path, pickled: bool, progress: Progress
) -> tuple[Violation, ...]:
    """See `sources.fetch`. `address` is `BUCKET[/PREFIX]`."""
    source = f"s3://{address}"
    bucket, _, prefix = address.partition("/")
    prefix = prefix.strip("/")
    if not bucket:
        raise InvalidRequest.field("DIR", source, "must be s3://BUCKET[/PREFIX]")
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise Unsupported.without("boto3") from None
    prefix += "/" if prefix else ""
    with _typed_errors(source):
        try:
            client = boto3.client("s3", config=Config(connect_timeout=5, read_timeout=60))
        except (BotoCoreError, ValueError) as error:
            raise refused_settings(error) from error
        listed: dict[str, tuple[int, str]] = {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(prefix)
                if name and not name.endswith("/"):
                    listed[name] = entry["Size"], entry["ETag"]
            if len(listed) > MAX_OBJECTS:
                hint = f"holds more than {MAX_OBJECTS} objects; name the adapter's own prefix"
                raise InvalidRequest.field("DIR", source, hint)
    if not listed:
        raise NotFound(f"{source} holds no objects; check bucket and prefix")
    names, warnings = select({name: size for name, (size, _) in listed.items()}, pickled=pickled)
    for name in names:
        size, etag = listed[name]
        with _typed_errors(source):
            # The S3 client verifies the object's checksum, if it has one, while it reads.
            answer = client.get_object(Bucket=bucket, Key=prefix + name, IfMatch=etag)
            chunks = answer["Body"].iter_chunks(_CHUNK_BYTES)
            write_bounded(name, chunks, folder / name, size, progress)
    return warnings


def refused_settings(error: Exception) -> InvalidRequest:
    """The error for AWS variables or files of which boto3 cannot make a client.

    Args:
        error: what boto3 raised. ValueError is an endpoint without a scheme.
    """
    if type(error) is not ValueError:  # some of boto3's own are ValueErrors as well
        return InvalidRequest(f"the AWS variables or files cannot be used: {error}")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    why = "must begin with http:// or https://"
    return InvalidRequest.field("AWS_ENDPOINT_URL_S3", endpoint, why)


@contextmanager
def _typed_errors(source: str) -> Iterator[None]:
    from botocore import exceptions

    try:
        yield
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        raise PermissionDenied(f"{source}: there are no AWS credentials") from error
    except exceptions.ParamValidationError as error:
        raise InvalidRequest.field("DIR", source, "is not a valid bucket name") from error
    except exceptions.ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = error.response.get("Error", {}).get("Code", "")
        if status == 404:
            raise NotFound(f"{source}: there is no such bucket or object ({code})") from error
        if status in (401, 403):
            raise PermissionDenied(f"{source}: access is denied ({code})") from error
        if status == 412:
            raise DataLoss(f"{source} changed while it was read; try again") from error
        raise Unavailable(f"{source}: the store answers {status} ({code})") from error
    except (exceptions.FlexibleChecksumError, exceptions.IncompleteReadError) as error:
        raise DataLoss(f"{source}: the received data is damaged; try again") from error
    except exceptions.BotoCoreError as error:
        raise Unavailable(f"{source}: the store does not answer: {error}") from error
