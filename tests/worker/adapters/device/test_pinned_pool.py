"""PinnedPool: bounded, no block of two images, the image asked for longest ago goes first."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from loraplex_services.worker.adapters.device.pinned_pool import PinnedPool
from loraplex_services.worker.adapters.pack.image import ImageIndex

NUM_BLOCKS = 6
IMAGE = b"sha256"
A, B, C, D, E = (Path(name) for name in "abcde")


def of_pages(num_pages):
    return ImageIndex("layout", num_pages, num_pages, [])


ACTS = st.tuples(st.sampled_from(("load", "drop")), st.integers(0, 7))


@given(sizes=st.lists(st.integers(0, 8), min_size=8, max_size=8), acts=st.lists(ACTS, max_size=40))
def test_it_holds_what_a_list_of_the_most_recent_images_holds(sizes, acts):
    pool = PinnedPool(NUM_BLOCKS, pages_per_block=1)
    recent: list[int] = []
    held: dict[int, set[int]] = {}
    for act, number in acts:
        folder, size = Path(str(number)), sizes[number]
        found = pool.find(folder, IMAGE)
        assert (found is not None) == (number in recent)
        recent = [other for other in recent if other != number]
        if act == "drop":
            if found is not None:
                pool.drop(folder)
            continue
        image = pool.enter(folder, IMAGE, of_pages(size)) if found is None else found
        if size > NUM_BLOCKS:
            assert image is None
            continue
        assert image is not None and len(set(image.first_pages)) == size
        held[number] = set(image.first_pages)
        recent.append(number)
        while sum(sizes[other] for other in recent) > NUM_BLOCKS:
            recent.pop(0)
        owned = [block for other in recent for block in held[other]]
        assert len(owned) == len(set(owned)) and set(owned) <= set(range(NUM_BLOCKS))


def test_an_image_that_is_asked_for_again_stays_longer():
    pool = PinnedPool(2, 1)
    for folder in (A, B):
        pool.enter(folder, IMAGE, of_pages(1))
    pool.find(A, IMAGE)
    pool.enter(C, IMAGE, of_pages(1))
    assert pool.find(B, IMAGE) is None
    assert pool.find(A, IMAGE) is not None


def test_small_images_share_a_block():
    pool = PinnedPool(1, pages_per_block=4)
    first_pages = [pool.enter(folder, IMAGE, of_pages(1)).first_pages for folder in (A, B, C, D)]
    assert sorted(first_pages) == [(0,), (1,), (2,), (3,)]
    assert pool.enter(E, IMAGE, of_pages(2)) is not None
    assert pool.find(A, IMAGE) is None and pool.find(B, IMAGE) is None
    assert pool.find(C, IMAGE) is not None and pool.find(D, IMAGE) is not None
