"""The disk cache of verified adapters: one folder per digest, bounded in bytes and number.

    <root>/adapters/<hex>/      manifest.json, adapter_config.json, and image-<layout>, the bytes
                                that the engine copies; adapter_model.safetensors only until there
                                is an image, or if the engine makes it from the base's weights
    <root>/incoming/<random>/   a fetch under way; swept at start
    <root>/lock                 held while a worker uses the folder
    <root>/quarantine/<hex>/    bytes that did not match their digest, the last few, for diagnosis

A folder appears under `adapters/` by rename, complete and verified, or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from loraplex.adapter_format.config import CONFIG_FILE
from loraplex.adapter_format.manifest import Manifest, digest_of, parse_manifest
from loraplex.errors import DataLoss, InvalidRequest, LoraplexError, ResourceExhausted
from loraplex_services.common.nonzero_counter import NonzeroCounter
from loraplex_services.worker.adapters.pack.image import images_in
from loraplex_services.worker.adapters.pack.pack_messages import DAMAGED_IMAGE

MANIFEST_FILE = "manifest.json"
MAX_QUARANTINED = 8
DEFAULT_SHARE = 0.25
"""The share that the cache may use by default, of the free space and its own together."""
MIN_DEFAULT_BYTES = 4 << 30
"""Smallest default size, however full the disk is."""
MAX_ADAPTERS = 16_384
"""The engine and every gateway keep 1 to 2 KiB in memory for each adapter on disk."""


@dataclass(frozen=True, slots=True)
class DiskAdapter:
    """An adapter on this machine."""

    digest: str
    path: Path
    max_rank: int
    sha256: str
    """sha256 of its tensor file."""
    num_bytes: int
    """Size of all its files."""
    num_pages: int = 0
    """Pages of its image, if it was verified in this run; 0 = it was not, or there is none yet."""


class DiskCache:
    """Owns the folders. Leased adapters are kept; of the others, the least recently used is deleted
    first.

    `on_gone(digest)` is called before an adapter's files are deleted.
    """

    def __init__(self, root: Path, max_bytes: int | None, on_gone: Callable[[str], None]) -> None:
        """`max_bytes`: None = by DEFAULT_SHARE."""
        self._adapters_dir = root / "adapters"
        self._incoming_dir = root / "incoming"
        self._quarantine_dir = root / "quarantine"
        self._on_gone = on_gone
        self._adapters: OrderedDict[str, DiskAdapter] = OrderedDict()
        self._leases: NonzeroCounter[str] = NonzeroCounter()
        self.num_bytes = 0
        """Size of all adapters."""
        self._lock_fd = self._lock(root)
        self._open()
        self._max_bytes = self._default_bytes(root) if max_bytes is None else max_bytes
        self._shrink()

    def close(self) -> None:
        """Release the folder to other processes."""
        os.close(self._lock_fd)

    def adapters(self) -> list[DiskAdapter]:
        """All adapters, the least recently used first."""
        return list(self._adapters.values())

    def get(self, digest: str) -> DiskAdapter | None:
        """The adapter, marked as just used; None if it is not on disk."""
        if digest in self._adapters:
            self._adapters.move_to_end(digest)
        return self._adapters.get(digest)

    def lease(self, digest: str) -> None:
        """Keep an adapter, present or still to come, until `release`."""
        self._leases[digest] += 1

    def release(self, digest: str) -> None:
        """End one lease."""
        self._leases.remove(digest)

    def is_leased(self, digest: str) -> bool:
        """True while someone needs the adapter."""
        return digest in self._leases

    def begin(self, adapter_manifest: bytes, manifest: Manifest) -> Path:
        """A fresh private folder to fetch into; end it with `commit` or `discard`."""
        folder = self._incoming_dir / secrets.token_hex(8)
        folder.mkdir()
        (folder / MANIFEST_FILE).write_bytes(adapter_manifest)
        (folder / CONFIG_FILE).write_bytes(manifest.config_bytes)
        return folder

    def discard(self, folder: Path) -> None:
        """Delete the remains of a failed fetch."""
        shutil.rmtree(folder, ignore_errors=True)

    def quarantine(self, folder: Path, digest: str) -> None:
        """Set damaged bytes aside, dropping the oldest beyond a few."""
        self._set_aside(folder, _hex(digest))

    def _set_aside(self, path: Path, name: str) -> None:
        target = self._quarantine_dir / name
        _delete(target)
        os.replace(path, target)
        by_age = sorted(self._quarantine_dir.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-MAX_QUARANTINED]:
            _delete(old)

    def commit(self, folder: Path, digest: str, manifest: Manifest, num_pages: int) -> DiskAdapter:
        """Add a verified folder, then delete what no longer fits."""
        path = self._adapters_dir / _hex(digest)
        os.replace(folder, path)
        [file] = manifest.files
        adapter = DiskAdapter(digest, path, manifest.max_rank, file.sha256, _size(path), num_pages)
        self._enter(adapter)
        self._shrink()
        return adapter

    def prepared(self, digest: str, num_pages: int) -> DiskAdapter | None:
        """Note that the image is intact, and measure the folder again. None = the adapter was
        deleted."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            return None
        if (damaged := adapter.path / DAMAGED_IMAGE).exists():
            self._set_aside(damaged, f"{_hex(digest)}-image")
        num_bytes = _size(adapter.path)
        self.num_bytes += num_bytes - adapter.num_bytes
        adapter = replace(adapter, num_bytes=num_bytes, num_pages=num_pages)
        self._adapters[digest] = adapter
        self._shrink()
        return adapter

    def drop(self, digest: str) -> None:
        """Delete an adapter that no engine knows, so that it is fetched again."""
        shutil.rmtree(self._leave(digest).path, ignore_errors=True)

    def drop_damaged(self, digest: str) -> None:
        """Move an adapter's folder to the quarantine, so that the adapter is fetched again."""
        if digest in self._adapters:
            self.quarantine(self._leave(digest).path, digest)

    def forget_pages(self) -> None:
        """Forget the pages of all images: another layout is used from now on."""
        for digest, adapter in self._adapters.items():
            self._adapters[digest] = replace(adapter, num_pages=0)

    def check_size(self, digest: str, manifest: Manifest) -> None:
        """Raises ResourceExhausted when an adapter is larger than the whole cache."""
        num_bytes = sum(file.size for file in manifest.files)
        if num_bytes > self._max_bytes:
            raise ResourceExhausted(
                f"adapter {digest} has {num_bytes} bytes, but the disk cache holds at "
                f"most {self._max_bytes}: raise LORAPLEX_CACHE_BYTES",
                reason="ADAPTER_TOO_LARGE",
            )

    def _lock(self, root: Path) -> int:
        """Take the folder for this process; the system lets go of it when the process ends.

        Raises:
            InvalidRequest: another worker has it.
        """
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise InvalidRequest.field(
                "LORAPLEX_STATE_DIR",
                str(root),
                "another worker uses this folder: give each worker its own",
            ) from None
        return lock

    def _open(self) -> None:
        shutil.rmtree(self._incoming_dir, ignore_errors=True)
        for folder in (self._adapters_dir, self._incoming_dir, self._quarantine_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = sorted(self._adapters_dir.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in found:
            adapter = _read_folder(path)
            if adapter is None:
                shutil.rmtree(path, ignore_errors=True)
            else:
                self._enter(adapter)

    def _default_bytes(self, root: Path) -> int:
        usable_bytes = shutil.disk_usage(root).free + self.num_bytes
        return max(MIN_DEFAULT_BYTES, int(DEFAULT_SHARE * usable_bytes))

    def _enter(self, adapter: DiskAdapter) -> None:
        self._adapters[adapter.digest] = adapter
        self.num_bytes += adapter.num_bytes

    def _leave(self, digest: str) -> DiskAdapter:
        adapter = self._adapters.pop(digest)
        self.num_bytes -= adapter.num_bytes
        return adapter

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes or len(self._adapters) > MAX_ADAPTERS:
            digest = next((digest for digest in self._adapters if not self.is_leased(digest)), None)
            if digest is None:
                return
            self._on_gone(digest)
            self.drop(digest)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _size(folder: Path) -> int:
    num_bytes = 0
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the engine may be renaming its image
            num_bytes += file.stat().st_size
    return num_bytes


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _read_folder(path: Path) -> DiskAdapter | None:
    """The adapter in a folder of an earlier run; None if it is incomplete."""
    try:
        raw = (path / MANIFEST_FILE).read_bytes()
        manifest = parse_manifest(raw)
        if digest_of(raw) != f"sha256:{path.name}":
            raise DataLoss(f"{path.name} holds another manifest")
        if (path / CONFIG_FILE).read_bytes() != manifest.config_bytes:
            raise DataLoss(f"{path.name} holds another config")
        for file in manifest.files:
            tensors = path / file.path
            if not tensors.exists() and not images_in(path):
                raise DataLoss(f"{path.name} holds neither {file.path} nor an image of it")
            if tensors.exists() and tensors.stat().st_size != file.size:
                raise DataLoss(f"{path.name}: {file.path} is cut short")
        sha256 = manifest.files[0].sha256
        return DiskAdapter(digest_of(raw), path, manifest.max_rank, sha256, _size(path))
    except (OSError, LoraplexError):
        return None
