"""The commands of the pages go-live.md and install.md, run in their order by a shell.

`kubectl` is the one of this folder, the bucket is moto's, and the metadata server is a Redis of
this machine. The job that downloads a base is replaced by a copy of the demo's base, and no image
is built or pushed here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import BotoCoreError

from demo.run import questions
from tests.deploy.cluster.kubectl import Kubectl
from tests.deploy.cluster.network import GATEWAY, run
from tests.e2e.stack import DEMO, REPO, clean_environment, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
PAGES = REPO / "docs" / "operate"
BUCKET = "my-bucket"
PASSWORD = "PASSWORD"
REDIS_HOST = "redis.example.com"
CREDENTIALS = {
    "endpoint_url": f"http://{GATEWAY}:9000",
    "aws_access_key_id": "...",
    "aws_secret_access_key": "...",
}
"""As the page writes them."""
EDITS = {
    "my-org/my-base": "loraplex-demo",
    "value: s3://my-bucket/loraplex\n": f"""value: s3://{BUCKET}/loraplex
      - op: add
        path: /data/AWS_ENDPOINT_URL_S3
        value: http://{GATEWAY}:9000
""",
}
QUESTION = next(each for each in questions(["reverse"]) if each.adapter == "reverse")


def blocks(page: str, heading: str = "") -> list[str]:
    """The commands of a page, or of one of its sections, in order."""
    text = (PAGES / page).read_text()
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^( *)```\n(.*?)^ *```", text, re.M | re.S)
    assert found, (page, heading)
    return [re.sub(f"^{indent}", "", block, flags=re.M) for indent, block in found]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the operator works: the manifests, an adapter, and the servers of others running."""
    desk = tmp_path_factory.mktemp("desk")
    shutil.copytree(REPO / "deploy" / "k8s", desk / "deploy" / "k8s")
    for name in ("reverse", "upper"):
        shutil.copytree(DEMO / "adapters" / name, desk / name)
    (desk / "reverse").rename(desk / "my-adapter")
    (desk / ".venv").symlink_to(sys.prefix)
    moto = str(Path(sys.executable).with_name("moto_server"))
    redis = ("redis-server", "--bind", "0.0.0.0", "--requirepass", PASSWORD, "--save", "")
    with Kubectl(desk, fill_models), (desk / "servers.log").open("w") as log:
        run("ip", "link", "set", "lo", "up")
        run("ip", "address", "replace", f"{GATEWAY}/32", "dev", "lo")
        servers = [
            subprocess.Popen(command, stdout=log, stderr=log, cwd=desk)
            for command in ((moto, "-H", "0.0.0.0", "-p", "9000"), redis)
        ]
        eventually(bucket_is_made)
        try:
            yield desk
        finally:
            for server in servers:
                server.kill()


def bucket_is_made() -> bool:
    """Make the bucket, once the server answers."""
    client = boto3.client("s3", region_name="us-east-1", **CREDENTIALS)
    try:
        client.create_bucket(Bucket=BUCKET)
    except BotoCoreError:
        return False
    return True


def fill_models(claim: Path) -> None:
    """Stands in for the download."""
    shutil.copytree(DEMO / "base", claim / "base", copy_function=os.link)


def shell(desk: Path, commands: str) -> str:
    """Run commands until one fails, and return what they print. Forwarded ports stay open."""
    environ = clean_environment() | {
        "PATH": f"{desk}/bin:{desk}/.venv/bin:{os.environ['PATH']}",
        "KUBECTL_SOCKET": str(desk / "kubectl.sock"),
    }
    output = desk / "output"
    with output.open("w") as file:
        done = subprocess.run(
            ["sh", "-exc", commands], cwd=desk, env=environ, stdout=file, stderr=file
        )
    assert done.returncode == 0, output.read_text()
    return output.read_text()


def edit(overlay: Path) -> None:
    """What the page asks for: the bucket and its endpoint, and the id of the base."""
    path = overlay / "kustomization.yaml"
    text = path.read_text()
    for old, new in EDITS.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def test_a_deployment_goes_live_by_the_commands_of_the_pages(desk: Path) -> None:
    copy, check, metadata, models, publish, smoke, backup = blocks("go-live.md")
    shell(desk, copy)
    edit(desk / "deploy/k8s/overlays/mine")
    shell(desk, check)
    secrets = [*blocks("install.md", "3. Create the Secrets"), metadata]
    # The page's server has a public certificate, which none can have here.
    external = "\n".join(secrets).replace("rediss://", "redis://").replace(REDIS_HOST, GATEWAY)
    apply = blocks("install.md", "4. Apply and wait")
    keys = blocks("install.md", "5. Create keys for your teams")
    prompt = shlex.quote(QUESTION.prompt)
    ask = f"loraplex generate support:prod {prompt} --raw --max-tokens 32 --temperature 0"
    parts = [external, models, *apply, *keys, publish, smoke, ask]
    assert shell(desk, "\n".join(parts)).rstrip().endswith(QUESTION.expected)
    # A shell of its own does not inherit what an earlier one exported.
    reach = "export LORAPLEX_REGISTRY_ADDRESS=127.0.0.1:50052 LORAPLEX_API_KEY_FILE=publisher-key"
    shell(desk, f"{reach}\n{backup}")
    second = "registry upload ./upper --name support\nregistry tag support:v2 prod"
    shown = shell(
        desk, f"{reach}\n{second}\nregistry rollback support prod\nregistry show support:prod"
    )
    assert "support:v1" in shown
    [_, restore] = blocks("backup.md")
    claim = desk / "cluster" / "pods" / "claims" / "loraplex-backup"
    here = restore.replace("/backup/", f"{claim}/").replace("s3://my-bucket", f"file://{desk}")
    shell(desk, f"cd {REPO} && {here}")
    assert list((desk / "restored" / "adapters").rglob("*.json"))
