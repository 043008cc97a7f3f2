"""How ranks divide a base."""

from dataclasses import replace

import pytest

from loraplex.errors import Unsupported
from loraplex_services.worker.types.model_config import (
    KvHeads,
    ModelConfig,
    MoeConfig,
    RecurrenceConfig,
    RopeConfig,
)
from loraplex_services.worker.types.sharding import (
    Cut,
    Shard,
    check_divisible,
    local_config,
    local_range,
    num_features,
    padded_share,
    within,
)
from loraplex_services.worker.types.sites import LINEAR, SiteRange, SiteTableBuilder

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=311,
    hidden_size=64,
    intermediate_size=136,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    activation="silu",
    max_position_embeddings=512,
    tied_embeddings=False,
    eos_token_ids=(2,),
    windows=(None, None),
    ropes=(RopeConfig(8, 10000.0),) * 2,
    attention_scale=1.0,
)
QKV = ((64, 8), (16, 2), (16, 2))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_head_is_on_a_rank_and_no_head_is_cut(size):
    seen = [Shard(rank, size).spans(QKV) for rank in range(size)]
    for features in range(0, 96, 8):
        owners = [spans for spans in seen if within(spans, features, features + 8)]
        assert owners
        assert all(num_features(within(s, features, features + 8)) == 8 for s in owners)


def test_ranks_beyond_the_key_heads_share_one():
    spans = [Shard(rank, 4).spans(QKV) for rank in range(4)]
    assert [s[1] for s in spans] == [(64, 72), (64, 72), (72, 80), (72, 80)]
    assert [s[0] for s in spans] == [(0, 16), (16, 32), (32, 48), (48, 64)]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_the_vocabulary_is_divided_without_gaps(size):
    spans = [Shard(rank, size).vocabulary(311) for rank in range(size)]
    assert [i for begin, end in spans for i in range(begin, end)] == list(range(311))
    assert all(end - begin <= padded_share(311, size) for begin, end in spans)


def test_modules_of_a_stacked_site_keep_their_order_on_a_rank():
    builder = SiteTableBuilder()
    builder.add(0, LINEAR, 64, [("q", 64), ("k", 16), ("v", 16)], Cut(outputs=QKV))
    builder.add(0, LINEAR, 64, [("o", 64)], Cut(inputs=((64, 8),)))
    table = builder.build().on_rank(Shard(1, 2))
    assert [(s.in_features, s.out_features) for s in table.sites] == [(64, 48), (32, 64)]
    assert table.modules["q"] == SiteRange(0, 0, 32)
    assert table.modules["k"] == SiteRange(0, 32, 8)
    assert table.modules["v"] == SiteRange(0, 40, 8)
    assert table.modules["o"] == SiteRange(1, 0, 64)


def test_one_module_over_several_segments_is_one_range_on_a_rank():
    spans = Shard(1, 2).spans(QKV)
    assert local_range(spans, 0, 96) == (0, 48)
    assert within(spans, 0, 96) == [(32, 64), (72, 80), (88, 96)]


def test_a_rank_attends_with_its_own_heads():
    own = local_config(CONFIG, Shard(1, 4))
    assert (own.num_heads, own.num_kv_heads, own.q_size, own.kv_size) == (2, 1, 16, 8)
    assert local_config(CONFIG, Shard()) is CONFIG


def test_layers_of_different_heads_are_cut_each_by_its_own():
    config = replace(CONFIG, own_kv_heads=(KvHeads(4, 8), KvHeads(1, 32)))
    assert local_config(config, Shard(1, 2)).kv_heads == (KvHeads(2, 8), KvHeads(1, 32))


RECURRENCE = RecurrenceConfig((0,), 4, 8, key_dim=16, value_dim=12, kernel_size=4)


def test_a_rank_has_its_own_heads_of_a_recurrent_layer():
    own = local_config(replace(CONFIG, recurrence=RECURRENCE), Shard(1, 4)).recurrence
    assert own is not None
    assert (own.num_key_heads, own.num_value_heads) == (1, 2)
    assert own.conv_size * 4 == RECURRENCE.conv_size


MOE = MoeConfig(4, 2, 40, renormalise=True, shared_intermediate_size=56)


@pytest.mark.parametrize(
    ("config", "size", "field"),
    [
        (CONFIG, 3, "num_attention_heads"),
        (replace(CONFIG, num_heads=9, num_kv_heads=9), 2, "num_attention_heads"),
        (replace(CONFIG, intermediate_size=137), 2, "intermediate_size"),
        (replace(CONFIG, num_heads=12, num_kv_heads=3), 2, "num_key_value_heads"),
        (replace(CONFIG, moe=replace(MOE, intermediate_size=41)), 2, "moe_intermediate_size"),
        (
            replace(CONFIG, moe=replace(MOE, shared_intermediate_size=57)),
            2,
            "shared_expert_intermediate_size",
        ),
        (replace(CONFIG, recurrence=RECURRENCE), 8, "linear_num_key_heads"),
        (
            replace(
                CONFIG, num_heads=12, num_kv_heads=12, own_kv_heads=(KvHeads(2, 8), KvHeads(3, 8))
            ),
            2,
            "num_key_value_heads",
        ),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_the_base_names_the_field(config, size, field):
    with pytest.raises(Unsupported, match="--tensor-parallel") as caught:
        check_divisible(config, size)
    assert caught.value.violations[0].field == f"config.json:{field}"


def test_numbers_of_ranks_that_divide_the_base_pass():
    for size in (1, 2, 4, 8):
        check_divisible(CONFIG, size)
