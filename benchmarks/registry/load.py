"""Inputs for the registry's benchmarks: adapters of a given size, stores full of versions."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

from loraplex.adapter_format import File, Geometry, Module
from loraplex.api.registry import TagTarget
from loraplex_services.common.documents import encode
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.records import BaseRecord, Move, TagRecord, VersionRecord

BASE_ID = "bench/eight-billion"
TENANT = "default"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_NUM_LAYERS = 32
_LINEARS = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
"""(in_features, out_features) of the linears of one layer of an 8B Llama."""
_BYTES_PER_RANK = 2 * _NUM_LAYERS * sum(sum(shape) for shape in _LINEARS.values())
_CHUNK_BYTES = 1 << 20


def base() -> BaseRecord:
    """A base of 8B shape; no weights are needed to check adapters against it."""
    modules = [
        Module(f"model.layers.{layer}.{name}", "linear", *shape, False)
        for layer in range(_NUM_LAYERS)
        for name, shape in _LINEARS.items()
    ]
    ordered = tuple(sorted(modules, key=lambda module: module.name))
    return BaseRecord(BASE_ID, Geometry("llama", "sha256:" + "8" * 64, 32, 128256, False, ordered))


def write_adapter(folder: Path, wanted_bytes: int, seed: int) -> int:
    """Write a bfloat16 adapter of all linears, near a size; returns its size in bytes."""
    rank = max(1, round(wanted_bytes / _BYTES_PER_RANK))
    header: dict[str, object] = {}
    end = 0
    for layer in range(_NUM_LAYERS):
        for name, (in_features, out_features) in _LINEARS.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for side, shape in (("A", [rank, in_features]), ("B", [out_features, rank])):
                begin, end = end, end + 2 * shape[0] * shape[1]
                header[f"{module}.lora_{side}.weight"] = {
                    "dtype": "BF16",
                    "shape": shape,
                    "data_offsets": [begin, end],
                }
    raw = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with (folder / TENSORS).open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        _write_finite(file.fileno(), end, seed, file.flush)
    (folder / CONFIG).write_text(json.dumps(_config(rank)))
    return sum(path.stat().st_size for path in folder.iterdir())


def _write_finite(descriptor: int, size: int, seed: int, flush: object) -> None:
    """Random bfloat16 bytes without an all-ones exponent, different for every seed and MiB."""
    assert callable(flush)
    flush()
    generator = random.Random(seed)
    clear = bytes(byte & 0xBF for byte in range(256))
    while size:
        chunk = generator.randbytes(min(size, _CHUNK_BYTES)).translate(clear)
        size -= os.write(descriptor, chunk)


def _config(rank: int) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_ID,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(name.split(".")[1] for name in _LINEARS),
    }


def fill_store(root: Path, first: int, last: int) -> None:
    """Write the documents of adapters `first` to `last - 1`, each with a version and `latest`.

    Straight into the folder of a file store, unsynced: it is the reading that is measured.
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
    files = (File(CONFIG, 900, f"{number + (1 << 100):064x}"), File(TENSORS, 10_000_000, sha256))
    version = VersionRecord(
        tenant=TENANT,
        name=name_of(number),
        version=1,
        digest=digest,
        base_id=BASE_ID,
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
