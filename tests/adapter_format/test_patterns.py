"""Selection by names, layers and patterns, on the cases where the rules bite."""

from __future__ import annotations

import pytest

from loraplex.adapter_format.geometry import Module
from loraplex.adapter_format.patterns import Selector, pattern_map

Q0 = "model.layers.0.self_attn.q_proj"
Q1 = "model.layers.1.self_attn.q_proj"


def selected(name: str, targets: str | list[str], **fields: object) -> bool:
    selector = Selector(targets if isinstance(targets, str) else frozenset(targets), **fields)
    return selector.selects(name)


def test_a_list_matches_whole_parts_at_the_end() -> None:
    assert selected(Q0, ["q_proj"])
    assert selected(Q0, ["self_attn.q_proj"])
    assert not selected(Q0, ["_proj"])
    assert not selected(Q0, ["self_attn"])


def test_a_string_must_match_the_whole_name() -> None:
    assert selected(Q0, r".*q_proj")
    assert not selected(Q0, "q_proj")


def test_all_linear_leaves_the_head_out() -> None:
    head = Module("lm_head", "lm_head", 8, 16, False)
    linear = Module(Q0, "linear", 8, 8, False)
    assert Selector("All-Linear").selects(Q0, linear)
    assert not Selector("all-linear").selects("lm_head", head)


def test_exclusion_wins_over_a_full_name() -> None:
    assert not selected(Q0, [Q0], excluded=frozenset({"q_proj"}))
    assert not selected(Q0, [Q0], excluded=r".*\.0\..*")


def test_layer_zero_is_a_layer() -> None:
    assert selected(Q0, ["q_proj"], layers=frozenset({0}))
    assert not selected(Q1, ["q_proj"], layers=frozenset({0}))


def test_a_full_name_is_not_subject_to_layers() -> None:
    assert selected(Q1, [Q1], layers=frozenset({0}))


def test_the_first_number_is_the_layer() -> None:
    name = "model.layers.1.mlp.experts.0.w1"
    assert selected(name, ["w1"], layers=frozenset({1}))
    assert not selected(name, ["w1"], layers=frozenset({0}))


def test_a_layers_pattern_picks_its_number() -> None:
    name = "model.blocks.3.layers.1.q_proj"
    fields = {"targets": ["q_proj"], "layers": frozenset({1})}
    assert selected(name, **fields, layers_pattern=("layers",))
    assert not selected(name, **fields, layers_pattern=("blocks",))
    assert not selected(name, **fields, layers_pattern=("h",))


def test_saved_modules_and_what_is_inside_them_get_no_lora() -> None:
    assert not selected(Q0, ["q_proj"], saved=("self_attn",))
    assert selected(Q0, ["q_proj"], saved=("attn",))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["k_proj", "q_proj"], "q_proj"),
        ([r"layers\.1\..*", "q_proj"], "q_proj"),
        ([r"layers\.0\..*", "q_proj"], r"layers\.0\..*"),
        (["q_proj", r"layers\.0\..*"], "q_proj"),
        (["proj"], None),
        (["self_attn"], None),
        ([rf"^{Q0}"], rf"^{Q0}"),
        (["k_proj|q_proj"], "k_proj|q_proj"),
        ([], None),
    ],
)
def test_the_first_key_that_covers_the_end_of_the_name_wins(
    keys: list[str], expected: str | None
) -> None:
    assert pattern_map([(key, key) for key in keys]).first_match(Q0) == expected
