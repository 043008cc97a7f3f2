"""Makes any number of distinct adapters from a few, by changing single last bits.

A copy has its own digest, files and entry in every cache, and decodes as its original does.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from loraplex.adapter_format import CONFIG_FILE, TENSOR_FILE
from loraplex.adapter_format.safetensors_header import TensorInfo, parse_header, read_prefix
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.errors import InvalidRequest

NAME_PREFIX = "trace-"
UPLOADS_AT_ONCE = 4


def source_folders(path: Path) -> list[Path]:
    """The adapter in `path`, or those in its sub-folders by name. Raises InvalidRequest."""
    candidates = [path, *sorted(path.iterdir())] if path.is_dir() else []
    folders = [folder for folder in candidates if (folder / CONFIG_FILE).is_file()]
    if not folders:
        raise InvalidRequest.field("--prepare-from", path, "holds no adapter folder")
    return folders


def write_variant(source: Path, variant: int, target: Path) -> None:
    """Copy an adapter to the folder `target`, with the last bits of its first values flipped
    where `variant` has ones; variant 0 is the original."""
    target.mkdir()
    shutil.copyfile(source / CONFIG_FILE, target / CONFIG_FILE)
    body = bytearray((source / TENSOR_FILE).read_bytes())
    tensors = parse_header(read_prefix(source / TENSOR_FILE), len(body)).tensors
    for bit, offset in zip(range(variant.bit_length()), _low_bytes(tensors), strict=False):
        body[offset] ^= variant >> bit & 1
    (target / TENSOR_FILE).write_bytes(body)


def _low_bytes(tensors: Sequence[TensorInfo]) -> Iterator[int]:
    """File offset of each value's least significant byte."""
    for tensor in tensors:
        yield from range(tensor.begin, tensor.end, 4 if tensor.dtype == "F32" else 2)


def variant_name(index: int) -> str:
    """Names are trace-00000 and so on."""
    return f"{NAME_PREFIX}{index:05d}"


async def publish_variants(registry: RegistryClient, path: Path, count: int) -> list[str]:
    """Publish `count` variants of the adapters under `path` in turn, as trace-00000 and on.

    Returns their names. An adapter that already has the same content stays as it is.
    """
    sources = source_folders(path)
    gate = asyncio.Semaphore(UPLOADS_AT_ONCE)

    async def publish(index: int) -> str:
        name = variant_name(index)
        async with gate:
            with tempfile.TemporaryDirectory(prefix="loraplex-trace-") as folder:
                variant = Path(folder) / name
                write_variant(sources[index % len(sources)], index // len(sources), variant)
                await registry.upload(variant, Publication(name))
        return name

    return await asyncio.gather(*(publish(index) for index in range(count)))
