"""Configures boto3 for the S3 store and interprets its errors."""

from __future__ import annotations

import contextlib
import functools
from datetime import datetime
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader, create_loader
from botocore.utils import parse_timestamp

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def connect_s3(attempts: int, connections: int) -> S3Client:
    """A client that sends each request up to `attempts` times, for `connections` threads."""
    config = Config(
        retries={"total_max_attempts": attempts, "mode": "standard"},
        max_pool_connections=connections,
        connect_timeout=5,
        read_timeout=60,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    parsers = session.get_component("response_parser_factory")
    parsers.set_parser_defaults(timestamp_parser=_timestamp)
    return boto3.Session(botocore_session=session).client("s3", config=config)


@functools.cache
def _loader(search_path: str | None) -> Loader:
    """It reads the description of the API, a megabyte of JSON, and keeps it for later clients."""
    return create_loader(search_path)


def _timestamp(value: Any) -> datetime:
    """Parse a time as botocore does, whose own parser takes most of the time of a listing."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(value)
    return parse_timestamp(value)


_CREDENTIALS = "the server refuses the credentials; check the AWS variables or files"
_EXPLANATIONS = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the address",
    "AccessDenied": "access is denied; check what the credentials may do",
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
}


def explained(error: ClientError | BotoCoreError | OSError) -> str:
    """Say what went wrong, with the remedy for common mistakes of a first start."""
    code = code_of(error) if isinstance(error, ClientError) else ""
    return f"{_EXPLANATIONS[code]} ({code})" if code in _EXPLANATIONS else str(error)


def code_of(error: ClientError) -> str:
    """S3's name of what went wrong, such as NoSuchKey."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """The HTTP status of the answer; 0 = there was none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
