"""Root file systems of images, and what stands in for images that no registry is asked for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.cluster.network import run


@dataclass(frozen=True)
class Image:
    """A root file system with the defaults of its image."""

    root: Path
    environ: Mapping[str, str]
    entrypoint: tuple[str, ...]
    health_port: int = 0
    """Set for a stand-in: the port whose opening answers every probe of the manifest."""

    @property
    def is_stand_in(self) -> bool:
        """Whether a program of this machine runs instead of the image, without its user."""
        return self.health_port != 0


# What the images of others run, as this machine has it. Manifests' arguments for them are not used.
STAND_INS = {
    "valkey/valkey": Image(
        Path("/"),
        {},
        # The manifest's arguments, but for the folder: nothing is saved.
        (
            *("sh", "-c", 'exec "$@" --requirepass "$REDISCLI_AUTH"', "sh"),
            *("redis-server", "--port", "6379", "--bind", "0.0.0.0"),
            *("--save", "", "--appendonly", "no"),
        ),
        6379,
    ),
    "quay.io/minio/minio": Image(
        Path("/"),
        {},
        (str(Path(sys.executable).with_name("moto_server")), "-H", "0.0.0.0", "-p", "9000"),
        9000,
    ),
}
PROGRAMS = {"haproxy": "/usr/sbin/haproxy"}
"""Images of others that consist of one program, which this machine has too. It runs as the manifest
says."""


class Images:
    """Images that buildah holds, each mounted once; `close` unmounts them."""

    def __init__(self) -> None:
        self._images: dict[str, Image] = {}
        self._containers: list[str] = []
        self._folders: list[Path] = []

    def get(self, tag: str) -> Image:
        """Raises RuntimeError for an image that was not built."""
        name = tag.partition(":")[0]
        if name in STAND_INS:
            return STAND_INS[name]
        if tag not in self._images:
            program = PROGRAMS.get(name)
            image = self._copied(program) if program else self._mount(f"localhost/{tag}")
            self._images[tag] = image
        return self._images[tag]

    def _copied(self, program: str) -> Image:
        """A root with a program of this machine and its libraries."""
        root = Path(tempfile.mkdtemp())
        root.chmod(0o755)
        self._folders.append(root)
        for path in (program, *re.findall(r"(/\S+) \(0x", run("ldd", program))):
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path[1:])
        return Image(root, {"PATH": os.environ["PATH"]}, (program,))

    def _mount(self, tag: str) -> Image:
        described = json.loads(run("buildah", "inspect", "--type", "image", tag))
        config = described["OCIv1"]["config"]
        container = run("buildah", "from", "--pull-never", tag).strip()
        self._containers.append(container)
        root = Path(run("buildah", "mount", container).strip())
        environ = dict(line.split("=", 1) for line in config["Env"])
        return Image(root, environ, tuple(config["Entrypoint"]))

    def close(self) -> None:
        """Drop the working containers."""
        for container in self._containers:
            subprocess.run(["buildah", "rm", container], check=False, capture_output=True)
        for folder in self._folders:
            shutil.rmtree(folder)
