"""The three services apart, with certificates in place of a shared token: upload, then generate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.servers import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long]
REPO = Path(__file__).parents[2]
DEMO = REPO / "demo"
ADMIN_KEY = "lpx_first_" + "s" * 24
WAIT_S = 120.0


@contextmanager
def _service(module: str, folder: Path, **variables: str) -> Iterator[None]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    with (folder / f"{module}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module], env={**kept, **variables}, stderr=log, cwd=REPO
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _certificate(house: Authority, name: str) -> dict[str, str]:
    pair = house.issue(name)
    return {
        "LORAPLEX_CA": str(house.ca),
        "LORAPLEX_CERT": str(pair.cert),
        "LORAPLEX_KEY": str(pair.key),
    }


def _complete(http: int) -> str:
    body = {"model": "rot13", "prompt": "abc=", "max_tokens": 3, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{http}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {ADMIN_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def test_services_with_certificates_need_no_token(tmp_path: Path) -> None:
    house = Authority(tmp_path / "house")
    people, services, worker, grpc, http = (free_port() for _ in range(5))
    key_file = tmp_path / "admin.key"
    key_file.write_text(ADMIN_KEY)
    objects = {"LORAPLEX_OBJECTS": f"file://{tmp_path}/objects"}
    with ExitStack() as stack:
        stack.enter_context(
            _service(
                "loraplex_services.registry",
                tmp_path,
                **_certificate(house, "registry"),
                **objects,
                LORAPLEX_STATE_DIR=str(tmp_path / "state"),
                LORAPLEX_AUTH="keys",
                LORAPLEX_ADMIN_KEY_FILE=str(key_file),
                LORAPLEX_SERVICE_NAMES="gateway",
                LORAPLEX_REGISTRY_LISTEN=f"127.0.0.1:{people},mtls:127.0.0.1:{services}",
            )
        )
        stack.enter_context(
            _service(
                "loraplex_services.worker",
                tmp_path,
                **_certificate(house, "worker"),
                **objects,
                LORAPLEX_SERVICE_NAMES="gateway",
                LORAPLEX_WORKER_LISTEN=f"127.0.0.1:{worker}",
                LORAPLEX_MODEL=str(DEMO / "base"),
                LORAPLEX_SERVED_MODEL_NAME="loraplex-demo",
                LORAPLEX_DEVICE="cpu",
                LORAPLEX_KV_MEMORY="64MiB",
            )
        )
        stack.enter_context(
            _service(
                "loraplex_services.gateway",
                tmp_path,
                **_certificate(house, "gateway"),
                LORAPLEX_AUTH="keys",
                LORAPLEX_REGISTRY_ADDRESS=f"127.0.0.1:{services}",
                LORAPLEX_WORKERS=f"127.0.0.1:{worker}",
                LORAPLEX_GATEWAY_LISTEN=f"127.0.0.1:{grpc}",
                LORAPLEX_HTTP_LISTEN=f"127.0.0.1:{http}",
            )
        )
        command = [
            *(sys.executable, "-m", "loraplex.cli.registry", "upload"),
            *(str(DEMO / "adapters" / "rot13"), "--name", "rot13", "--base", "loraplex-demo"),
            *("--registry", f"127.0.0.1:{people}", "--ca", str(house.ca), "--json"),
        ]
        variables = {**os.environ, "LORAPLEX_API_KEY": ADMIN_KEY}
        deadline_s = time.monotonic() + WAIT_S
        while subprocess.run(command, env=variables, capture_output=True, cwd=REPO).returncode:
            logs = "".join(path.read_text()[-1500:] for path in tmp_path.glob("*.log"))
            assert time.monotonic() < deadline_s, logs
            time.sleep(0.5)
        while True:
            try:
                assert _complete(http) == "nop"
                break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline_s
                time.sleep(0.5)
