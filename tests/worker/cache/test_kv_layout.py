"""KV groups: equal, of one kind, within the block limit."""

from loraplex_services.worker.cache.kv_layout import MAX_BLOCK_BYTES, plan_kv_groups


def test_llama_3_8b_needs_one_group():
    groups = plan_kv_groups([None] * 32, num_kv_heads=8, head_dim=128, itemsize=2)
    assert len(groups.groups) == 1
    assert groups.block_bytes == 2 * 1024 * 1024


def test_llama_2_7b_needs_four_groups():
    groups = plan_kv_groups([None] * 32, num_kv_heads=32, head_dim=128, itemsize=2)
    assert [len(group.layers) for group in groups.groups] == [8] * 4
    assert groups.block_bytes <= MAX_BLOCK_BYTES


def test_windows_never_share_a_group_with_full_attention():
    windows = [4096, None] * 13
    groups = plan_kv_groups(windows, num_kv_heads=4, head_dim=256, itemsize=2)
    assert {len(group.layers) for group in groups.groups} == {13}
    for group in groups.groups:
        assert {windows[layer] for layer in group.layers} == {group.window}
    assert sorted(layer for group in groups.groups for layer in group.layers) == list(range(26))


def test_uneven_kinds_get_groups_of_a_common_size():
    windows = [None if layer % 6 == 5 else 512 for layer in range(26)]
    groups = plan_kv_groups(windows, num_kv_heads=1, head_dim=256, itemsize=2)
    assert {len(group.layers) for group in groups.groups} == {2}
    assert groups.windows.count(None) == 2
    assert groups.windows.count(512) == 11
