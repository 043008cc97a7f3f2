"""S3 servers for tests: moto in this process, and a real one where the environment has it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from loraplex_services.common.objects import ObjectStore, open_store
from loraplex_services.common.objects.probe import probe

FILE_AND_S3 = ["file", pytest.param("s3", marks=pytest.mark.s3)]
"""Stores to run a test on: a folder always, a real S3 server where `-m s3` asks for it."""
only_files = pytest.mark.parametrize("objects_url", ["file"], indirect=True)
"""For tests that change the files of a store behind its back."""


@contextlib.contextmanager
def moto() -> Iterator[dict[str, str]]:
    """A moto server: the AWS_* variables that lead to it."""
    # It logs each request to stderr where nothing configures logging.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        # Any will do here, and boto3 keeps those that it found first.
        "AWS_ACCESS_KEY_ID": os.environ.get("AWS_ACCESS_KEY_ID", "test"),
        "AWS_SECRET_ACCESS_KEY": os.environ.get("AWS_SECRET_ACCESS_KEY", "test"),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()


def need_real_server() -> None:
    """Skip where the environment leads to no S3 server."""
    if "AWS_ENDPOINT_URL_S3" not in os.environ:
        pytest.skip("needs an S3 server: scripts/s3_server.sh .venv/bin/pytest -m s3")


def new_bucket() -> str:
    """Make an empty bucket on the server of the environment; returns its name."""
    bucket = f"loraplex-{secrets.token_hex(6)}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return bucket


async def proven_store(url: str) -> ObjectStore:
    """Open a store as a registry does at start; files need no proof."""
    store = open_store(url)
    if url.startswith("s3:"):
        await probe(store)
    return store


def objects_url_of(store: str, folder: os.PathLike[str]) -> str:
    """`LORAPLEX_OBJECTS` of an empty store, of a kind named in `FILE_AND_S3`."""
    if store == "file":
        return f"file://{os.fspath(folder)}/objects"
    need_real_server()
    return f"s3://{new_bucket()}/some/prefix"
