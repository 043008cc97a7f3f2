"""Memory of weights, before and after it is moved into huge pages."""

import threading

import torch

from loraplex_services.worker.native.pages import CHUNK_BYTES, PAGE_BYTES, WeightMemory, huge_pages


def filled(memory, sizes):
    taken = [memory.take(size, torch.bfloat16) for size in sizes]
    for value, weights in enumerate(taken):
        weights.fill_(value)
    return taken


def assert_held(taken, sizes):
    for value, (weights, size) in enumerate(zip(taken, sizes, strict=True)):
        assert weights.shape == (size,)
        assert weights.data_ptr() % 64 == 0
        assert (weights == value).all()


def test_weights_are_apart_and_keep_their_values_when_they_move():
    memory, sizes = WeightMemory(), (5, 3 << 20, CHUNK_BYTES // 2 - 7, 1, CHUNK_BYTES, 9 << 20)
    taken = filled(memory, sizes)
    assert_held(taken, sizes)
    addresses = [weights.data_ptr() for weights in taken]
    memory.use_huge_pages()
    later = filled(memory, (3 << 20, 11))
    for thread in threading.enumerate():
        if thread.name == "huge pages":
            thread.join()
    assert_held(taken, sizes)
    assert_held(later, (3 << 20, 11))
    assert [weights.data_ptr() for weights in taken] == addresses


def test_without_weights_nothing_moves():
    WeightMemory().use_huge_pages()
    assert "huge pages" not in {thread.name for thread in threading.enumerate()}


def test_memory_begins_with_a_page_and_ends_as_asked():
    memory = huge_pages(PAGE_BYTES + 3)
    assert memory.data_ptr() % PAGE_BYTES == 0
    assert memory.fill_(7).sum() == 7 * (PAGE_BYTES + 3)


def test_weights_that_are_added_move_too_and_small_ones_stay():
    memory = WeightMemory()
    sizes = (3, 5 << 20)
    taken = [torch.full((size,), value) for value, size in enumerate(sizes)]
    for weight in taken:
        memory.add(weight)
    filled(memory, (7,))
    addresses = [weight.data_ptr() for weight in taken]
    memory.use_huge_pages()
    for thread in threading.enumerate():
        if thread.name == "huge pages":
            thread.join()
    assert all((weight == value).all() for value, weight in enumerate(taken))
    assert [weight.data_ptr() for weight in taken] == addresses
