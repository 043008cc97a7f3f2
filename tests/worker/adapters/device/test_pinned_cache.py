"""The pinned pool's copies, on the CPU: the code of a GPU's but for the stream."""

import random
import threading
import time
from pathlib import Path

import pytest
import torch

from loraplex.errors import DataLoss, InvalidRequest
from loraplex_services.worker.adapters.device import pinned_cache
from loraplex_services.worker.adapters.device.pinned_cache import CopyForecast, PinnedCache
from loraplex_services.worker.adapters.pack.image import ImageFile, ImageIndex, PackedAdapter
from loraplex_services.worker.arena_buffer import ArenaBuffer

BLOCK_BYTES = 64
SLAB_BLOCKS = 8
A, B = Path("a"), Path("b")


class CountedImage:
    """An image that counts how often its bytes are read."""

    def __init__(self, image):
        self._image = image
        self.index, self.sha256 = image.index, image.sha256
        self.num_reads = 0

    def read_into(self, buffers, begin=0):
        self.num_reads += begin == 0
        self._image.read_into(buffers, begin)


def image_of(seed, num_blocks):
    num_bytes = num_blocks * BLOCK_BYTES - 8  # the last block is not full
    data = random.Random(seed).randbytes(num_bytes)
    index = ImageIndex("layout", num_blocks, num_bytes, [])
    return PackedAdapter(index, memoryview(data)), data


@pytest.fixture
def arena():
    arena = ArenaBuffer(32, BLOCK_BYTES, torch.device("cpu"))
    arena.data.fill_(0xEE)
    return arena


@pytest.fixture
def tier(arena, monkeypatch):
    monkeypatch.setattr(pinned_cache, "CHUNK_BYTES", 100)
    return PinnedCache(arena, SLAB_BLOCKS * BLOCK_BYTES)


def held(arena, blocks, num_bytes):
    return arena.data[blocks].flatten()[:num_bytes].numpy().tobytes()


def test_blocks_hold_the_image_whatever_was_copied_before(arena, tier):
    generator = random.Random(7)
    images = [image_of(seed, generator.randint(1, SLAB_BLOCKS + 3)) for seed in range(12)]
    for _ in range(200):
        number = generator.randrange(len(images))
        image, data = images[number]
        blocks = generator.sample(range(arena.num_blocks), image.index.num_pages)
        copy_events, expected_s = tier.copy(Path(str(number)), image, blocks, step_s=1.0)
        assert copy_events is None and expected_s == 0.0
        assert held(arena, blocks, len(data)) == data


def test_neighbouring_blocks_are_one_copy_where_the_slab_s_are_neighbours(arena, tier, monkeypatch):
    image, data = image_of(3, 6)
    sizes = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        lambda target, source, **kwargs: (
            sizes.append(source.numel()) or copy(target, source, **kwargs)
        ),
    )
    monkeypatch.setattr(pinned_cache, "CHUNK_BYTES", 1000)
    blocks = [10, 11, 12, 4, 5, 20]
    tier.copy(A, image, blocks, step_s=0.0)
    assert held(arena, blocks, len(data)) == data
    assert sizes == [3 * BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES - 8]


def test_only_the_image_s_bytes_are_written(arena, tier):
    image, _ = image_of(1, 2)
    tier.copy(A, image, [5, 3], step_s=0.0)
    others = [block for block in range(arena.num_blocks) if block not in (5, 3)]
    assert (arena.data[others] == 0xEE).all()
    assert (arena.data[3, -8:] == 0xEE).all()


def test_an_image_in_the_slab_is_not_read_again(arena, tier):
    image = CountedImage(image_of(1, 3)[0])
    for _ in range(3):
        tier.copy(A, image, [0, 1, 2], step_s=0.0)
    assert image.num_reads == 1
    tier.copy(B, image_of(2, SLAB_BLOCKS)[0], range(8, 16), step_s=0.0)
    tier.copy(A, image, [0, 1, 2], step_s=0.0)
    assert image.num_reads == 2


@pytest.mark.parametrize("num_blocks", [1, 3, 5, 6, 7, 8])
def test_all_memory_that_was_asked_for_holds_images(arena, num_blocks):
    tier = PinnedCache(arena, num_blocks * BLOCK_BYTES + BLOCK_BYTES // 2)
    folders = [Path(str(number)) for number in range(num_blocks)]
    for number, folder in enumerate(folders):
        tier.copy(folder, image_of(number, 1)[0], [0], step_s=0.0)
    assert all(folder in tier for folder in folders)
    tier.copy(A, image_of(99, 1)[0], [0], step_s=0.0)
    assert [folder in tier for folder in folders] == [False, *[True] * (num_blocks - 1)]


def test_another_image_of_a_folder_replaces_the_first(arena, tier):
    tier.copy(A, image_of(1, 2)[0], [0, 1], step_s=0.0)
    image, data = image_of(2, 3)
    tier.copy(A, image, [4, 5, 6], step_s=0.0)
    assert held(arena, [4, 5, 6], len(data)) == data
    assert A in tier and tier.take_left() == ()


def test_images_that_leave_are_reported_once_and_not_if_they_come_back(tier):
    def copy(folder, seed, num_blocks):
        tier.copy(folder, image_of(seed, num_blocks)[0], range(num_blocks), step_s=0.0)

    copy(A, 1, 3)
    copy(B, 2, SLAB_BLOCKS)
    assert A not in tier and tier.take_left() == (A,)
    assert tier.take_left() == ()
    copy(A, 1, 3)
    copy(B, 2, SLAB_BLOCKS)
    copy(A, 1, 3)
    assert tier.take_left() == (B,)


def test_an_image_that_ends_early_is_not_kept(arena, tier, tmp_path):
    image, data = image_of(1, 3)
    path = tmp_path / "image"
    image.write(path)
    complete = path.read_bytes()
    path.write_bytes(complete[:-50])
    with ImageFile(path) as file, pytest.raises(DataLoss, match="cut short"):
        tier.copy(A, file, [0, 1, 2], step_s=0.0)
    path.write_bytes(complete)
    with ImageFile(path) as file:
        assert file.sha256 == image.sha256
        tier.copy(A, file, [0, 1, 2], step_s=0.0)
    assert held(arena, [0, 1, 2], len(data)) == data


def test_a_copy_that_fails_ends_after_all_its_reads(arena, tier):
    """They write to memory that the next image may get."""
    image, _ = image_of(3, 6)
    failed, ended = threading.Event(), []

    class BrokenImage(CountedImage):
        def read_into(self, buffers, begin=0):
            if begin == 0:
                failed.set()
                raise DataLoss("the image is cut short")
            failed.wait()
            time.sleep(0.05)
            ended.append(begin)

    with pytest.raises(DataLoss):
        tier.copy(A, BrokenImage(image), list(range(6)), step_s=1.0)
    assert sorted(ended) == [100, 200, 300]
    assert A not in tier


def test_a_copy_lands_behind_those_under_way_at_the_rate_of_the_last():
    forecast = CopyForecast()
    assert forecast.expect(100, now=0.0) is None
    forecast.measured(1000, 2.0)
    assert forecast.expect(500, now=10.0) == pytest.approx(1.0)
    assert forecast.expect(500, now=10.5) == pytest.approx(1.5)
    assert forecast.expect(500, now=20.0) == pytest.approx(1.0)


def test_memory_that_the_driver_does_not_pin_is_refused_by_the_name_of_the_setting(monkeypatch):
    class Driver:
        """The CUDA runtime, out of memory."""

        @staticmethod
        def cudaHostRegister(address, num_bytes, flags):
            return 2

        @staticmethod
        def cudaGetErrorString(error):
            return "out of memory"

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    with pytest.raises(InvalidRequest, match=r"HOST_CACHE_BYTES.+out of memory.+smaller"):
        pinned_cache._pin(torch.zeros(4096, dtype=torch.uint8))
