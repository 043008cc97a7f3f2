"""An S3 server and a Redis server whose certificates a private CA signed, with the stack."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import BotoCoreError

from loraplex.errors import Unavailable
from loraplex_services.common.objects import open_store
from loraplex_services.common.objects.probe import probe
from tests.certificates import Authority, Pair
from tests.e2e.stack import ADAPTERS, start
from tests.servers import free_port, redis_with_tls

pytestmark = [pytest.mark.e2e, pytest.mark.long]
WAIT_S = 60.0
BUCKET = "behind-tls"


@contextmanager
def _running(*command: str, folder: Path) -> Iterator[None]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _redis(port: int, pair: Pair, ca: Path) -> list[str]:
    return [
        *(redis_with_tls(), "--port", "0", "--tls-port", str(port), "--save", ""),
        *("--tls-cert-file", str(pair.cert), "--tls-key-file", str(pair.key)),
        *("--tls-ca-cert-file", str(ca), "--tls-auth-clients", "no", "--requirepass", "secret"),
    ]


def _s3(port: int, pair: Pair) -> list[str]:
    program = str(Path(sys.executable).with_name("moto_server"))
    return [program, "-H", "127.0.0.1", "-p", str(port), "-c", str(pair.cert), "-k", str(pair.key)]


def _make_bucket() -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            return
        except BotoCoreError:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)


async def test_the_stack_trusts_the_ca_that_it_is_given_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, other = Authority(tmp_path / "house"), Authority(tmp_path / "other")
    redis_port, s3_port = free_port(), free_port()
    aws = {
        "AWS_ENDPOINT_URL_S3": f"https://127.0.0.1:{s3_port}",
        "AWS_CA_BUNDLE": str(house.ca),
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in aws.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as servers:
        redis = _redis(redis_port, house.issue("redis"), house.ca)
        servers.enter_context(_running(*redis, folder=tmp_path))
        servers.enter_context(_running(*_s3(s3_port, house.issue("s3")), folder=tmp_path))
        _make_bucket()
        url = f"rediss://:secret@127.0.0.1:{redis_port}/0?ssl_ca_certs={house.ca}"
        objects = {"LORAPLEX_OBJECTS": f"s3://{BUCKET}/adapters", "LORAPLEX_METADATA": url}
        stack = start(tmp_path / "state", environment=objects)
        try:
            [rot13] = [folder for folder in ADAPTERS if folder.name == "rot13"]
            stack.publish(rot13)
            answer = stack.complete("rot13", "abc=", max_tokens=3)
            assert answer["choices"][0]["text"] == "nop"
        finally:
            assert stack.stop() == 0
        monkeypatch.setenv("AWS_CA_BUNDLE", str(other.ca))
        store = open_store(objects["LORAPLEX_OBJECTS"])
        with pytest.raises(Unavailable, match="certificate"):
            await probe(store)
        await store.close()
