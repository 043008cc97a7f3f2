"""Adapters from a bucket of an S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from loraplex.errors import InvalidAdapter, InvalidRequest, NotFound, PermissionDenied, Unavailable
from loraplex.sources import fetch
from loraplex_services.common.objects import open_store
from tests.s3_servers import moto, new_bucket

ADAPTER = Path(__file__).parents[2] / "demo" / "adapters" / "mask"
FILES = {path.name: path.read_bytes() for path in ADAPTER.iterdir()}


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with moto() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def bucket() -> str:
    """With an adapter under models/support/v7, and other things alongside it."""
    name = new_bucket()
    client = boto3.client("s3")
    for path, content in FILES.items():
        client.put_object(Bucket=name, Key=f"models/support/v7/{path}", Body=content)
    client.put_object(Bucket=name, Key="models/support/v7/checkpoint-9/x", Body=b"1")
    client.put_object(Bucket=name, Key="models/support/v70/adapter_config.json", Body=b"other")
    return name


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_objects_of_the_prefix_are_fetched(bucket: str, tmp_path: Path, slash: str) -> None:
    source = f"s3://{bucket}/models/support/v7{slash}"
    [warning] = fetch(source, tmp_path, pickled=False)
    assert warning.value == "checkpoint-9/x"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("no-such-bucket-at-all/x", NotFound),
        ("{bucket}/models/support/v8", NotFound),
        ("{bucket}/models", InvalidAdapter),
        ("", InvalidRequest),
        ("A B/x", InvalidRequest),
    ],
)
def test_what_is_not_there_is_said(
    bucket: str, tmp_path: Path, address: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        fetch(f"s3://{address.format(bucket=bucket)}", tmp_path, pickled=False)
    assert list(tmp_path.iterdir()) == []


def test_objects_over_the_limits_are_not_fetched(bucket: str, tmp_path: Path) -> None:
    key = "models/support/v7/README.md"
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=b"x" * ((1 << 20) + 1))
    with pytest.raises(InvalidAdapter, match=r"README\.md: must have at most"):
        fetch(f"s3://{bucket}/models/support/v7", tmp_path, pickled=False)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_away_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(Unavailable):
        fetch("s3://bucket/x", tmp_path, pickled=False)


def test_missing_credentials_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(PermissionDenied, match="no AWS credentials"):
        fetch("s3://bucket/x", tmp_path, pickled=False)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AWS_ENDPOINT_URL_S3", "minio:9000", "AWS_ENDPOINT_URL_S3.*must begin with http"),
        ("AWS_PROFILE", "nope", r"AWS variables .* profile \(nope\) could not be found"),
    ],
)
def test_aws_variables_that_cannot_be_used_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(InvalidRequest, match=said):
        fetch("s3://bucket/x", tmp_path, pickled=False)
    with pytest.raises(InvalidRequest, match=said):
        open_store("s3://bucket/x")
