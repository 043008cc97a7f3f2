"""Inputs for the registry's benchmarks: adapters of a given size, stores full of versions."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from benchmarks.llama import LLAMA_3_8B, module_name, write_hollow_adapter
from loraplex.adapter_format import CONFIG_FILE, File, Geometry, Module
from loraplex.adapter_format.safetensors_header import TENSOR_FILE
from loraplex.api.registry import TagTarget
from loraplex_services.common.documents import encode
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.records import BaseRecord, Move, TagRecord, VersionRecord

SHAPE, TENANT = LLAMA_3_8B, "default"
_CHUNK_BYTES = 1 << 20


def base() -> BaseRecord:
    """A base of 8B shape; no weights are needed to check adapters against it."""
    modules = [
        Module(module_name(layer, name), "linear", *sizes, False)
        for layer in range(SHAPE.num_layers)
        for name, sizes in SHAPE.linears.items()
    ]
    ordered = tuple(sorted(modules, key=lambda module: module.name))
    sizes = SHAPE.num_layers, SHAPE.vocab_size
    return BaseRecord(SHAPE.name, Geometry("llama", "sha256:" + "8" * 64, *sizes, False, ordered))


def write_adapter(folder: Path, wanted_bytes: int, seed: int) -> int:
    """Write a bfloat16 adapter of all linears, near a size; returns its size in bytes."""
    rank = max(1, round(wanted_bytes / (2 * SHAPE.num_adapter_weights(1))))
    begin = write_hollow_adapter(SHAPE, folder, rank, "BF16")
    left = 2 * SHAPE.num_adapter_weights(rank)
    generator = random.Random(seed)
    finite = bytes(byte & 0xBF for byte in range(256))  # no exponent is all ones
    with (folder / TENSOR_FILE).open("r+b") as file:
        file.seek(begin)
        while left:
            chunk = generator.randbytes(min(left, _CHUNK_BYTES)).translate(finite)
            left -= file.write(chunk)
    return sum(path.stat().st_size for path in folder.iterdir())


def fill_store(root: Path, first: int, last: int) -> None:
    """Write the documents of adapters `first` to `last - 1`, each with a version and `latest`.

    They go straight to the folder of a file store and are not synced, because only reading is
    measured.
    """
    for number in range(first, last):
        version, tag = _documents(number)
        _write(root / layout.version(TENANT, version.name, 1), version)
        _write(root / layout.tag(TENANT, version.name, tag.tag), tag)


async def fill_bucket(store: ObjectStore, last: int) -> None:
    """Write the documents of adapters 0 to `last - 1` into any store."""
    for first in range(0, last, 500):
        puts = []
        for number in range(first, min(first + 500, last)):
            version, tag = _documents(number)
            puts.append(store.put(layout.version(TENANT, version.name, 1), encode(version)))
            puts.append(store.put(layout.tag(TENANT, version.name, tag.tag), encode(tag)))
        await asyncio.gather(*puts)


def name_of(number: int) -> str:
    """Name of the adapter of a number."""
    return f"adapter-{number:06d}"


def _documents(number: int) -> tuple[VersionRecord, TagRecord]:
    sha256 = f"{number:064x}"
    digest = f"sha256:{number + (1 << 200):064x}"
    files = (
        File(CONFIG_FILE, 900, f"{number + (1 << 100):064x}"),
        File(TENSOR_FILE, 10_000_000, sha256),
    )
    version = VersionRecord(
        tenant=TENANT,
        name=name_of(number),
        version=1,
        digest=digest,
        base_id=SHAPE.name,
        base_fingerprint="sha256:" + "8" * 64,
        created_s=1.7e9 + number,
        files=files,
        labels={"team": f"team-{number % 20}"},
        max_rank=16,
        num_modules=224,
        peft_version="0.18.0",
        upload_id=f"{number:049x}",
    )
    targets = (TagTarget(1, digest),)
    move = Move(1, targets, 1.7e9 + number, "", f"{version.upload_id}:v1")
    return version, TagRecord(TENANT, version.name, "latest", targets, 1, move.moved_s, (move,))


def _write(path: Path, record: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(record))
