"""Scanning a tensor file while it arrives: the same answer as reading it afterwards, or none."""

from __future__ import annotations

import struct

import pytest

from loraplex.adapter_format import parse_header, prefix_bytes
from loraplex.adapter_format.tensor_scan import TensorScan
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.publish import scanning
from loraplex_services.registry.publish.scanning import ArrivingScan, Scans
from tests.adapter_format.builders import Tensor, tensor_file
from tests.registry.house import TENSORS, adapter_files, declared, opened, publish

NAN = struct.pack("<f", float("nan"))
FILE = tensor_file(
    {
        "zero": Tensor("F32", (7, 3), bytes(4)),
        "one": Tensor("F32", (5,)),
        "two": Tensor("F16", (9,)),
    }
)


def _fed(data: bytes, step: int, size: int | None = None) -> frozenset[str] | None:
    scan = ArrivingScan(len(data) if size is None else size)
    for begin in range(0, len(data), step):
        scan.feed(data[begin : begin + step])
    return scan.finish()


@pytest.mark.parametrize("step", [1, 3, 8, 100, 1 << 20])
def test_chunks_of_any_size_give_the_answer_of_the_whole_file(step: int) -> None:
    complete = TensorScan(parse_header(FILE[: prefix_bytes(FILE[:8], len(FILE))], len(FILE)))
    complete.feed(FILE)
    assert _fed(FILE, step) == complete.finish() == {"zero"}


@pytest.mark.parametrize(
    "data",
    [
        tensor_file({"bad": Tensor("F32", (4,), NAN)}),
        FILE[:-1],
        FILE[:20],
        b"",
        b"\xff" * 100,
        (3).to_bytes(8, "little") + b"[1]",
    ],
)
def test_a_file_that_is_bad_or_not_whole_has_no_answer(data: bytes) -> None:
    assert _fed(data, 10, size=max(len(data), 1)) is None


@pytest.mark.hostile
def test_answers_with_many_names_replace_others() -> None:
    scans = Scans()
    names = frozenset(f"{number:0100}" for number in range(45_000))
    for number in range(5):
        scans.remember(str(number), names)
    kept = [scans.zero_tensors(str(number)) is not None for number in range(5)]
    assert kept == [False, False, False, False, True], "10 MB each"


@pytest.mark.hostile
def test_a_header_that_takes_long_to_parse_is_left_to_the_process_that_validates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scanning, "_MAX_HEADER_BYTES", prefix_bytes(FILE[:8], len(FILE)) - 1)
    assert _fed(FILE, 10) is None


async def test_an_upload_is_scanned_once_while_it_arrives(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = adapter_files(1)
    session = await opened(registry, "sql", files)
    sha256 = next(file.sha256 for file in declared(files) if file.path == TENSORS)
    assert registry.uploads._scans.zero_tensors(sha256) is not None
    reads: list[int] = []
    get_range = registry.store.get_range

    async def counted(key: str, offset: int, length: int) -> bytes:
        data = await get_range(key, offset, length)
        reads.append(offset + len(data))
        return data

    monkeypatch.setattr(registry.store, "get_range", counted)
    await registry.publisher.finish(session)
    assert max(reads) < len(files[TENSORS]), "the tensors themselves are not read again"


async def test_values_are_scanned_from_the_store_where_no_answer_is_kept(
    registry: Registry,
) -> None:
    await publish(registry, "sql", 1)
    registry.uploads._scans._zeros = LruCache(0)
    assert (await publish(registry, "other", 1)).version.version == 1
