"""KV groups: equal, of one kind, within the block limit."""

from loraplex_services.worker.cache.kv_layout import MAX_BLOCK_BYTES, plan_kv_groups
from loraplex_services.worker.types.extents import count_pages_per_block
from loraplex_services.worker.types.model_config import KvHeads


def test_llama_3_8b_needs_one_group():
    groups = plan_kv_groups([None] * 32, [KvHeads(8, 128)] * 32, itemsize=2)
    assert len(groups.groups) == 1
    assert groups.block_bytes == 2 * 1024 * 1024


def test_llama_2_7b_needs_four_groups():
    groups = plan_kv_groups([None] * 32, [KvHeads(32, 128)] * 32, itemsize=2)
    assert [len(group.layers) for group in groups.groups] == [8] * 4
    assert groups.block_bytes <= MAX_BLOCK_BYTES


def test_windows_never_share_a_group_with_full_attention():
    windows = [4096, None] * 13
    groups = plan_kv_groups(windows, [KvHeads(4, 256)] * 26, itemsize=2)
    assert {len(group.layers) for group in groups.groups} == {13}
    for group in groups.groups:
        assert {windows[layer] for layer in group.layers} == {group.window}
    assert sorted(layer for group in groups.groups for layer in group.layers) == list(range(26))


def test_uneven_kinds_get_groups_of_a_common_size():
    windows = [None if layer % 6 == 5 else 512 for layer in range(26)]
    groups = plan_kv_groups(windows, [KvHeads(1, 256)] * 26, itemsize=2)
    assert {len(group.layers) for group in groups.groups} == {2}
    assert groups.windows.count(None) == 2
    assert groups.windows.count(512) == 11


NARROW, WIDE = KvHeads(1, 256), KvHeads(1, 512)


def test_layers_of_two_shapes_share_blocks_that_both_fill():
    windows = ([512] * 4 + [None]) * 3
    heads = [WIDE if window is None else NARROW for window in windows]
    groups = plan_kv_groups(windows, heads, itemsize=2)
    assert [(len(g.layers), g.window, g.heads) for g in groups.groups] == [
        (6, 512, NARROW),
        (6, 512, NARROW),
        (3, None, WIDE),
    ]
    assert groups.block_bytes == 6 * 2 * groups.plane_bytes(NARROW)


def test_shapes_that_do_not_divide_leave_the_least_empty():
    windows = ([1024] * 5 + [None]) * 5
    heads = [KvHeads(2, 512) if window is None else KvHeads(8, 256) for window in windows]
    groups = plan_kv_groups(windows, heads, itemsize=2)
    used = sum(2 * groups.plane_bytes(own) for own in heads)
    assert sorted(layer for group in groups.groups for layer in group.layers) == list(range(30))
    assert 1 <= len(groups.groups) * groups.block_bytes / used < 1.02


def test_layers_that_read_the_keys_of_another_have_none_of_their_own():
    groups = plan_kv_groups([None] * 4, [NARROW] * 4, itemsize=2, without_kv=(2, 3))
    assert [group.layers for group in groups.groups] == [(0, 1)]


def test_blocks_of_codes_are_divided_into_as_many_pages_as_those_of_floats():
    windows, heads = [None] * 30, [KvHeads(3, 64)] * 30
    floats = plan_kv_groups(windows, heads, itemsize=2)
    codes = plan_kv_groups(windows, heads, itemsize=1, scale_bytes=2)
    pages = [count_pages_per_block(groups.block_bytes) for groups in (floats, codes)]
    assert pages == [32, 32]
    assert 1 < codes.block_bytes / (30 * 2 * codes.plane_bytes(heads[0])) < 1.003


def test_a_small_block_grows_by_less_than_a_page_start():
    codes = plan_kv_groups([None], [KvHeads(1, 5)], itemsize=1, scale_bytes=2)
    assert 0 <= codes.block_bytes - 2 * codes.plane_bytes(KvHeads(1, 5)) < 64
