"""Fetching by digest from a real store in a folder."""

from __future__ import annotations

import asyncio
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.adapter_format.geometry import Geometry
from loraplex.adapter_format.manifest import digest_of
from loraplex.adapter_format.safetensors_header import TENSOR_FILE
from loraplex.errors import (
    AdapterNotFound,
    DataLoss,
    InvalidAdapter,
    InvalidRequest,
    ResourceExhausted,
    Unavailable,
)
from loraplex_services.common.objects.file import FileStore
from loraplex_services.common.objects.store import blob_key
from loraplex_services.worker.adapters.fetch import disk_cache
from loraplex_services.worker.adapters.fetch.disk_cache import DiskCache
from loraplex_services.worker.adapters.fetch.pack_pool import PackPool
from loraplex_services.worker.adapters.fetch.source import AdapterSource
from loraplex_services.worker.adapters.pack.image import ImageFile, image_path, images_in
from loraplex_services.worker.adapters.pack.pack_messages import DAMAGED_IMAGE
from loraplex_services.worker.adapters.pack.pack_process import prepare
from loraplex_services.worker.adapters.pack.packing import Packer
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from tests.worker import tiny


class Here:
    """Prepares adapters in this process."""

    def __init__(self, geometry: Geometry, layout: AdapterLayout) -> None:
        self.packer = Packer(geometry, layout)
        self.fingerprint = layout.fingerprint

    async def prepare(self, folder: Path, sha256: str) -> int:
        return prepare(folder, sha256, self.packer)

    async def close(self) -> None: ...


class Stage:
    """A store with adapters, a disk cache, and a source between them."""

    def __init__(self, root: Path, max_bytes: int = 1 << 30, max_rank: int = 64) -> None:
        self.root = root
        self.store = FileStore(root / "objects")
        self.gone: list[str] = []
        self.disk = DiskCache(root / "cache", max_bytes, self.gone.append)
        self.now = 0.0
        self.source = AdapterSource(self.store, self.disk, lambda: self.now)
        base = root / "base"
        self.geometry: Geometry = tiny.base_geometry(
            base if base.exists() else tiny.write_base(base)
        )
        self.layout = tiny.layout(max_rank)
        self.source.pack_with(Here(self.geometry, self.layout))

    async def publish(self, name: str, rank: int = 4, use_dora: bool = False) -> str:
        folder = tiny.write_adapter(self.root / name, len(name), rank, use_dora=use_dora)
        return await tiny.publish(self.store, self.geometry, folder)

    def restarted(self) -> Stage:
        """The same folders as another process finds them."""
        self.disk.close()
        return Stage(self.root)

    def tensor_blob(self, name: str) -> Path:
        data = (self.root / name / "adapter_model.safetensors").read_bytes()
        return self.root / "objects" / blob_key(digest_of(data))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def test_a_fetched_adapter_is_on_disk_once_as_its_image(stage: Stage) -> None:
    digest = await stage.publish("one")
    adapter = await stage.source.ensure(digest)
    assert (adapter.digest, adapter.max_rank) == (digest, 4)
    image = image_path(adapter.path, stage.layout.fingerprint).name
    names = {file.name for file in adapter.path.iterdir()}
    assert names == {"manifest.json", "adapter_config.json", image}
    assert not list((stage.root / "cache/incoming").iterdir())


async def test_tensors_whose_image_takes_the_base_stay_as_they_were_published(stage: Stage) -> None:
    adapter = await stage.source.ensure(await stage.publish("dora", use_dora=True))
    assert adapter.num_pages == 0
    original = stage.root / "dora" / TENSOR_FILE
    assert (adapter.path / TENSOR_FILE).read_bytes() == original.read_bytes()


async def test_concurrent_callers_share_one_fetch(stage: Stage) -> None:
    digest = await stage.publish("one")
    adapters = await asyncio.gather(*(stage.source.ensure(digest) for _ in range(8)))
    assert len({id(adapter) for adapter in adapters}) == 1


async def test_a_caller_that_gives_up_does_not_stop_the_fetch_of_the_others(stage: Stage) -> None:
    digest = await stage.publish("one")
    impatient = asyncio.create_task(stage.source.ensure(digest))
    patient = asyncio.create_task(stage.source.ensure(digest))
    await asyncio.sleep(0)
    impatient.cancel()
    assert (await patient).digest == digest


async def test_the_cache_survives_a_restart_without_the_store(stage: Stage) -> None:
    digest = await stage.publish("one")
    await stage.source.ensure(digest)
    (stage.root / "objects" / blob_key(digest)).unlink()
    again = stage.restarted()
    assert (await again.source.ensure(digest)).max_rank == 4


def test_a_cache_folder_belongs_to_one_worker(stage: Stage) -> None:
    with pytest.raises(InvalidRequest, match="another worker uses this folder"):
        Stage(stage.root)
    stage.restarted()


async def test_a_folder_cut_short_is_dropped_at_the_restart_and_fetched_again(
    stage: Stage,
) -> None:
    digest = await stage.publish("one", use_dora=True)
    tensors = (await stage.source.ensure(digest)).path / TENSOR_FILE
    complete = tensors.read_bytes()
    tensors.write_bytes(complete[:-1])
    again = stage.restarted()
    assert again.disk.adapters() == []
    await again.source.ensure(digest)
    assert tensors.read_bytes() == complete


async def test_a_fetched_adapter_comes_with_its_image(stage: Stage) -> None:
    adapter = await stage.source.ensure(await stage.publish("one"))
    with ImageFile(image_path(adapter.path, stage.layout.fingerprint)) as image:
        image.check(stage.layout.fingerprint)
        assert image.index.num_pages == adapter.num_pages > 0
    assert adapter.num_bytes == sum(file.stat().st_size for file in adapter.path.iterdir())


async def test_an_image_is_packed_once_and_verified_after_a_restart(stage: Stage) -> None:
    first = await stage.source.ensure(digest := await stage.publish("one"))
    image = image_path(first.path, stage.layout.fingerprint)
    made_ns = image.stat().st_mtime_ns
    again = stage.restarted()
    assert again.disk.adapters()[0].num_pages == 0, "not verified yet"
    assert (await again.source.ensure(digest)) == first
    assert image.stat().st_mtime_ns == made_ns


@pytest.mark.parametrize("place", [3, 30, 200, -1])
async def test_a_damaged_image_is_set_aside_and_its_adapter_fetched_again(
    stage: Stage, place: int
) -> None:
    first = await stage.source.ensure(digest := await stage.publish("one"))
    image = image_path(first.path, stage.layout.fingerprint)
    good = bytearray(image.read_bytes())
    damaged = bytearray(good)
    damaged[place] ^= 1
    image.write_bytes(damaged)
    again = stage.restarted()
    assert (await again.source.ensure(digest)) == first
    assert image.read_bytes() == good
    [kept] = (stage.root / "cache/quarantine").iterdir()
    assert (kept / DAMAGED_IMAGE).read_bytes() == damaged
    assert again.disk.num_bytes == first.num_bytes


async def test_another_layout_fetches_anew_and_leaves_no_old_image(stage: Stage) -> None:
    first = await stage.source.ensure(digest := await stage.publish("one"))
    other = replace(stage.layout, block_bytes=2 * stage.layout.block_bytes)
    stage.source.pack_with(Here(stage.geometry, other))
    second = await stage.source.ensure(digest)
    assert second.num_pages < first.num_pages
    assert images_in(first.path) == [image_path(first.path, other.fingerprint)]
    assert not list((stage.root / "cache/quarantine").iterdir()), "nothing was damaged"
    assert stage.disk.num_bytes == second.num_bytes
    await stage.source.close()


async def test_what_is_packed_while_another_engine_comes_is_packed_for_that_one(
    stage: Stage,
) -> None:
    stage.source.pack_with(PackPool(stage.geometry, stage.layout))
    digest = await stage.publish("one")
    flight = asyncio.create_task(stage.source.ensure(digest))
    while not list((stage.root / "cache/incoming").glob(f"*/{TENSOR_FILE}")):
        await asyncio.sleep(0.001)
    other = replace(stage.layout, block_bytes=2 * stage.layout.block_bytes)
    stage.source.pack_with(Here(stage.geometry, other))
    adapter = await flight
    assert adapter.num_pages > 0
    assert images_in(adapter.path) == [image_path(adapter.path, other.fingerprint)]
    await stage.source.close()


async def test_a_file_damaged_on_disk_is_set_aside_and_fetched_again(stage: Stage) -> None:
    digest = await stage.publish("one", use_dora=True)
    first = await stage.source.ensure(digest)
    tensors = first.path / TENSOR_FILE
    complete = tensors.read_bytes()
    tensors.write_bytes(complete[:-1] + bytes([complete[-1] ^ 1]))
    again = stage.restarted()
    assert (await again.source.ensure(digest)) == first
    assert tensors.read_bytes() == complete
    assert (stage.root / "cache/quarantine" / first.path.name).is_dir()


async def test_numbers_that_are_none_are_refused(stage: Stage) -> None:
    folder = tiny.write_adapter(stage.root / "nan", seed=1)
    tensors = folder / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4] + struct.pack("<f", math.nan))
    digest = await tiny.publish(stage.store, stage.geometry, folder)
    with pytest.raises(InvalidAdapter, match="NaN"):
        await stage.source.ensure(digest)
    assert stage.disk.adapters() == []


async def test_processes_prepare_survive_a_kill_and_answer_the_right_caller(stage: Stage) -> None:
    stage.source.pack_with(pool := PackPool(stage.geometry, stage.layout))
    await pool.warm_up()
    assert len(pool._processes) == 1
    digests = [await stage.publish(name) for name in ("one", "three", "seventh")]
    impatient = asyncio.create_task(stage.source.ensure(digests[0]))
    await asyncio.sleep(0)
    impatient.cancel()
    adapters = await asyncio.gather(*(stage.source.ensure(digest) for digest in digests))
    assert [adapter.digest for adapter in adapters] == digests
    for process in pool._processes:
        process.kill()
        await process.wait()
    last = await stage.source.ensure(await stage.publish("eleven..."))
    assert last.num_pages == adapters[0].num_pages
    await stage.source.close()
    assert all(process.returncode is not None for process in pool._processes)


async def test_unknown_digests_are_not_found_and_misspelt_ones_refused(stage: Stage) -> None:
    with pytest.raises(AdapterNotFound):
        await stage.source.ensure("sha256:" + "0" * 64)
    with pytest.raises(InvalidRequest):
        await stage.source.ensure("../../etc/passwd")


async def test_damaged_tensors_are_quarantined(stage: Stage) -> None:
    digest = await stage.publish("one")
    blob = stage.tensor_blob("one")
    blob.write_bytes(blob.read_bytes()[:-1] + b"\0")
    with pytest.raises(DataLoss, match="does not match"):
        await stage.source.ensure(digest)
    kept = stage.root / "cache/quarantine" / digest.removeprefix("sha256:")
    assert (kept / "adapter_model.safetensors").read_bytes() == blob.read_bytes()
    assert stage.disk.adapters() == []


async def test_a_damaged_manifest_is_data_loss(stage: Stage) -> None:
    digest = await stage.publish("one")
    (stage.root / "objects" / blob_key(digest)).write_bytes(b"{}")
    with pytest.raises(DataLoss, match="manifest"):
        await stage.source.ensure(digest)


async def test_a_failure_is_remembered_for_a_pause_then_tried_again(stage: Stage) -> None:
    digest = await stage.publish("one")
    blob = stage.tensor_blob("one")
    complete = blob.read_bytes()
    blob.unlink()
    with pytest.raises(DataLoss, match="lost blob"):
        await stage.source.ensure(digest)
    blob.write_bytes(complete)
    with pytest.raises(DataLoss, match="lost blob"):
        await stage.source.ensure(digest)
    stage.now = 1.0
    assert (await stage.source.ensure(digest)).digest == digest


async def test_an_error_of_the_cache_names_its_cause_and_not_its_path(stage: Stage) -> None:
    digest = await stage.publish("one")
    incoming = stage.root / "cache" / "incoming"
    incoming.rmdir()
    incoming.write_bytes(b"")
    with pytest.raises(Unavailable, match=r"could not be fetched: Not a directory$"):
        await stage.source.ensure(digest)


async def test_a_blob_that_ends_early_is_not_taken(stage: Stage) -> None:
    digest = await stage.publish("one")
    blob = stage.tensor_blob("one")
    blob.write_bytes(blob.read_bytes()[:-10])
    with pytest.raises((DataLoss, Unavailable)):
        await stage.source.ensure(digest)
    assert stage.disk.adapters() == []


async def test_a_rank_over_the_limit_is_refused(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_rank=8)
    digest = await stage.publish("large", rank=16)
    with pytest.raises(InvalidAdapter, match="more than the 8 that is served"):
        await stage.source.ensure(digest)


async def test_the_least_recently_used_adapter_leaves_a_full_cache(tmp_path: Path) -> None:
    probe = Stage(tmp_path / "probe")
    one = (await probe.source.ensure(await probe.publish("one"))).num_bytes
    stage = Stage(tmp_path / "stage", max_bytes=3 * one)
    digests = [await stage.publish(name) for name in ("one", "three", "seventh", "eleven...")]
    for digest in digests[:3]:
        await stage.source.ensure(digest)
    await stage.source.ensure(digests[0])
    stage.disk.lease(digests[1])
    await stage.source.ensure(digests[3])
    assert stage.gone == [digests[2]]
    assert {a.digest for a in stage.disk.adapters()} == {digests[0], digests[1], digests[3]}
    assert sum(a.num_bytes for a in stage.disk.adapters()) <= 3 * one + 1024


async def test_many_small_adapters_leave_by_their_number(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "MAX_ADAPTERS", 2)
    digests = [await stage.publish(name) for name in ("one", "three", "seventh", "eleven...")]
    stage.disk.lease(digests[0])
    for digest in digests:
        await stage.source.ensure(digest)
    assert stage.gone == digests[1:3]
    assert {a.digest for a in stage.disk.adapters()} == {digests[0], digests[3]}


async def test_an_adapter_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_bytes=100)
    digest = await stage.publish("one")
    with pytest.raises(ResourceExhausted, match="the disk cache holds at most 100"):
        await stage.source.ensure(digest)
