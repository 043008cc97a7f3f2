"""Uploads and pulls of complete adapters through a registry process, compared with file copies."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measuring import median_ratio, timed
from benchmarks.registry import load
from benchmarks.registry.process import RegistryProcess
from benchmarks.registry.stream import CountingServer
from loraplex.client.progress import ignore_progress
from loraplex.client.publishing import Publication, local_files
from loraplex.client.sent_files import hash_files

MB = 1_000_000
_COPY_BYTES = 1 << 20


async def transfers(work: Path, rounds: int) -> dict[str, Any]:
    """Upload and pull of 100 MB as a share of the speed of copying and hashing the same bytes.

    The bounds are printed as well. Of a pull: a bare gRPC stream. Of an upload: the hash that it
    declares, then a stream whose other end hashes, writes and syncs, and does nothing else.
    """
    names = ("copy", "hash", "stream", "keep", "upload", "pull")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    async with RegistryProcess(work / "transfers") as registry, CountingServer() as counting:
        await registry.register(load.base())
        for number in range(rounds + 1):
            folder = work / f"adapter-{number}"
            size = load.write_adapter(folder, 100 * MB, number)
            measured = await _one_transfer(registry, folder, work / "other", f"t{number}")
            measured["stream"] = await counting.stream_s(size)
            measured["keep"] = await counting.stream_s(size, keep=True)
            for name, value in measured.items():
                if number:  # The first round warms both sides up.
                    seconds[name].append(value)
            shutil.rmtree(folder)
    bound = [a + b for a, b in zip(seconds["hash"], seconds["keep"], strict=True)]
    return {
        "adapter_bytes": size,
        "copy_and_sha256_mb_per_s": round(size / MB / statistics.median(seconds["copy"])),
        "upload_ratio": median_ratio(seconds["copy"], seconds["upload"]),
        "pull_ratio": median_ratio(seconds["copy"], seconds["pull"]),
        "bound_of_upload_ratio": median_ratio(seconds["copy"], bound),
        "bound_of_pull_ratio": median_ratio(seconds["copy"], seconds["stream"]),
        "rounds": {name: [round(value, 4) for value in all_] for name, all_ in seconds.items()},
    }


async def _one_transfer(
    registry: RegistryProcess, folder: Path, other: Path, name: str
) -> dict[str, float]:
    with timed() as copy:
        copy_and_hash(folder, other)
    shutil.rmtree(other)
    with timed() as hashing:
        await hash_files(local_files(folder), ignore_progress)
    with timed() as upload:
        await registry.client.upload(folder, Publication(name))
    with timed() as pull:
        await registry.client.pull(name, other)
    shutil.rmtree(other)
    await registry.client.delete(name, every=True, purge=True)
    return {"copy": copy[0], "hash": hashing[0], "upload": upload[0], "pull": pull[0]}


def copy_and_hash(source: Path, target: Path) -> None:
    """Copy durably, in one pass with the hash. Pulls are synced too."""
    target.mkdir()
    for path in source.iterdir():
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file, (target / path.name).open("wb", 0) as out:
            while data := file.read(_COPY_BYTES):
                digest.update(data)
                out.write(data)
            os.fsync(out.fileno())


async def memory(work: Path, rounds: int) -> dict[str, Any]:
    """Peak resident bytes of the server while an adapter of 10 and of 500 MB goes in and out."""
    peaks: dict[int, list[int]] = {10: [], 500: []}
    for number in range(rounds):
        for size_mb, found in peaks.items():
            folder, state, other = (work / f"{part}-{size_mb}" for part in ("in", "state", "out"))
            load.write_adapter(folder, size_mb * MB, number)
            async with RegistryProcess(state) as registry:
                await registry.register(load.base())
                registry.forget_peak()
                await registry.client.upload(folder, Publication("a"))
                await registry.client.pull("a", other)
                found.append(registry.peak_bytes())
            for used in (folder, state, other):
                shutil.rmtree(used)
    small, large = (statistics.median(found) for found in peaks.values())
    return {
        "peak_mb_for_10_mb": round(small / MB),
        "peak_mb_for_500_mb": round(large / MB),
        "difference_mb": round((large - small) / MB),
    }
