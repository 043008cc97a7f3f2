"""The state folder of `loraplex up`: locked by one owner, with a layout version, kept across
restarts.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from loraplex.errors import AlreadyExists, InvalidRequest

LAYOUT = 1
STAMP = "layout.json"
LOCK = "lock"
MAX_SOCKET_FOLDER_BYTES = 80
"""Socket paths end at 107 bytes on Linux, 103 on macOS."""


class StateDir:
    """A locked state folder."""

    def __init__(self, path: Path) -> None:
        """Create the folder if it is missing, lock it and check its layout version.

        Raises:
            AlreadyExists: another `up` holds it.
            InvalidRequest: it cannot be written, or has another layout.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _locked(path)
        except OSError as error:
            raise InvalidRequest.field(
                "--state-dir", str(path), f"cannot be used: {error.strerror}"
            ) from None
        _check_stamp(path / STAMP)
        self.sockets = _socket_folder(path)
        self.scratch = self.cache / "scratch"
        """Folder of the workers' temporary files. It is emptied first, because killed workers leave
        files."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(mode=0o700, parents=True)

    @property
    def objects(self) -> Path:
        """Folder of the object store."""
        return self.path / "objects"

    @property
    def cache(self) -> Path:
        """Folder of verified adapters, with one sub-folder for each worker."""
        return self.path / "cache"

    def release(self) -> None:
        """Release the lock; the file remains. Sockets in another folder are deleted with it."""
        if self.sockets.parent != self.path:
            shutil.rmtree(self.sockets, ignore_errors=True)
        self._lock.close()


def _locked(path: Path) -> IO[str]:
    file = (path / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "an unknown process"
        file.close()
        raise AlreadyExists(
            f"{path} is in use by {holder}; stop it, or choose another --state-dir",
            reason="STATE_DIR_IN_USE",
        ) from None
    file.truncate(0)
    file.write(f"loraplex up, process {os.getpid()}\n")
    file.flush()
    return file


def _check_stamp(stamp: Path) -> None:
    if not stamp.exists():
        stamp.write_text(json.dumps({"layout": LAYOUT}) + "\n")
        return
    try:
        layout = json.loads(stamp.read_text())["layout"]
    except (ValueError, KeyError, TypeError):
        layout = "unreadable"
    if layout != LAYOUT:
        raise InvalidRequest.field(
            "--state-dir",
            str(stamp.parent),
            f"has layout {layout}, this version reads {LAYOUT}; use another folder",
        )


def _socket_folder(state: Path) -> Path:
    """A folder that only the user can enter, with a path short enough for sockets."""
    folder = state / "run"
    if len(os.fsencode(folder)) > MAX_SOCKET_FOLDER_BYTES:
        return Path(tempfile.mkdtemp(prefix="loraplex-"))
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder
