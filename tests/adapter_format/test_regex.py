"""The bounded matcher says what `re` says, and never takes long."""

from __future__ import annotations

import re
import tracemalloc
import warnings

import pytest
from hypothesis import given, settings

from loraplex.adapter_format.regex import MAX_WORK, BadPattern, Work, matches_all, matches_start
from loraplex.adapter_format.regex_parser import MAX_PATTERN_CHARS, parse
from tests.adapter_format import strategies


def agree(pattern: str, text: str) -> bool:
    """Whether the pattern is accepted; fails where it then means another thing than to `re`."""
    try:
        node = parse(pattern)
    except BadPattern:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expression = re.compile(pattern)
    assert matches_all(node, text, Work()) == (expression.fullmatch(text) is not None)
    assert matches_start(node, text, Work()) == (expression.match(text) is not None)
    return True


@settings(max_examples=800, deadline=None)
@given(strategies.patterns(), strategies.texts())
def test_accepted_patterns_mean_what_they_mean_to_re(pattern: str, text: str) -> None:
    agree(pattern, text)


@settings(max_examples=800, deadline=None)
@given(strategies.noisy_patterns(), strategies.texts())
def test_no_accepted_pattern_is_invalid_to_re(pattern: str, text: str) -> None:
    agree(pattern, text)


@pytest.mark.long
@settings(max_examples=300_000, deadline=None)
@given(strategies.patterns(), strategies.texts())
def test_accepted_patterns_mean_what_they_mean_to_re_at_length(pattern: str, text: str) -> None:
    agree(pattern, text)


SEEN_IN_ADAPTERS = [
    r".*\.(q_proj|v_proj)",
    r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*",
    r"^(model\.language_model(?=\.).*\.(gate_proj|up_proj|down_proj|q_proj))$",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))",
    r"model\.layers\.(1[0-9]|2[0-3])\.self_attn\.[qkvo]_proj",
    r".*layers\.[0-9]+\.mlp\.experts\.\d+\.(w1|w2|w3)",
    r"^model.layers.0.self_attn.q_proj$",
    r"(?<!vision_)model\.layers\.\d+\..*proj",
    r"(?P<layer>model\.layers\.\d+)\.mlp\..{2,4}_proj",
]
NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.12.mlp.up_proj",
    "model.language_model.layers.3.mlp.gate_proj",
    "model.visual.blocks.1.attn.q_proj",
    "model.layers.23.mlp.experts.7.w1",
    "vision_model.layers.1.mlp.down_proj",
    "lm_head",
]


@pytest.mark.parametrize("pattern", SEEN_IN_ADAPTERS)
def test_patterns_that_trainers_write_are_accepted(pattern: str) -> None:
    assert all(agree(pattern, name) for name in NAMES)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)\1",
        r"(?P<n>a)(?P=n)",
        r"(?P<n>a)(?P<n>b)",
        r"(?i)q_proj",
        r"(?i:q_proj)",
        r"(?#note)a",
        r"(?>a+)b",
        r"a++",
        r"(a)?(?(1)b|c)",
        r"(a*)*",
        r"(a|)+",
        r"(?:a?){3}",
        r"(?<=a+)b",
        r"a{1001}",
        r"a{2,1}",
        r"a**",
        r"*a",
        r"^*",
        r"(a",
        r"a)",
        r"[a",
        r"[b-a]",
        r"[\d-z]",
        r"[[a]]",
        r"[a--b]",
        r"a{",
        r"a{}",
        r"a\x41",
        r"\q",
        r"\B",
        "a\\",
        "(?",
        "(" * 40 + ")" * 40,
        "a" * (MAX_PATTERN_CHARS + 1),
    ],
)
def test_what_is_not_accepted_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        parse(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(a|a)+$",
        r"(a|aa)+$",
        r"(.*a){20}$",
        r"([a-z]+)x",
        r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)x",
        r"(a+){5,}(a+){5,}x",
        r"((a+)+)+$",
        r"(?!(a+)+$)b",
    ],
)
def test_patterns_that_hang_re_are_answered_at_once(pattern: str) -> None:
    """None of these would end in a lifetime if it were matched by backtracking."""
    work = Work()
    assert matches_all(parse(pattern), "a" * 200 + "!", work) is False
    assert work.left > MAX_WORK - 20_000


def test_work_that_runs_out_is_said() -> None:
    node = parse("(?:a{400}|)" * 180)
    with pytest.raises(BadPattern, match="too long to match"):
        matches_all(node, "a" * 500, Work(50_000))


def test_parsed_patterns_are_not_kept() -> None:
    """They take 200 times the memory of the text, and any publisher can send many."""
    tracemalloc.start()
    try:
        for number in range(20):
            parse(f"{number}" + "[a]" * 600)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200_000
