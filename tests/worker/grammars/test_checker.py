"""The checks of grammars, with its real process. No torch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.api.sampling import Grammar
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.grammars.checker import GrammarChecker
from loraplex_services.worker.grammars.compiling import MAX_GRAMMAR_BYTES, MAX_OPTIONS

TOKENIZER = Path(__file__).parents[3] / "demo" / "base" / "tokenizer.json"
VOCAB, EOS = 264, [257]
GOOD = Grammar(regex="[a-z]+")


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(TOKENIZER)
    yield checker
    await checker.close()


def chain(length: int) -> Grammar:
    """Rules that nest as deep as they are many."""
    rules = [f'x{i}: "a" x{i + 1} "b"' for i in range(length)]
    return Grammar(ebnf="\n".join(["start: x0", *rules, f'x{length}: "c"']))


@pytest.mark.parametrize(
    "grammar",
    [
        GOOD,
        Grammar(choice=("", 'quo"te', "back\\slash", "line\nbreak", "日本")),
        Grammar(ebnf='start: word+\nword: /[a-z]+/ " "'),
        Grammar(json_schema='{"$defs":{"t":{"items":{"$ref":"#/$defs/t"}}},"$ref":"#/$defs/t"}'),
        Grammar(json_schema="true"),
        chain(50),
    ],
    ids=lambda grammar: grammar.form,
)
async def test_good_grammars_of_every_form_pass(checker: GrammarChecker, grammar: Grammar) -> None:
    await checker.check(grammar, VOCAB, EOS)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(), "set one of json_schema"),
        (Grammar(choice=()), "no options"),
        (Grammar(choice=("a",) * (MAX_OPTIONS + 1)), "options"),
        (Grammar(regex="a" * (MAX_GRAMMAR_BYTES + 1)), "bytes"),
        (Grammar(json_schema='{"a": NaN}'), "not valid JSON"),
        (Grammar(json_schema="[" * 100_000), "nested too deeply"),
        (Grammar(json_schema="false"), "is an object"),
        (Grammar(json_schema=json.dumps({"$ref": "http://example.com/x"})), "fetch"),
        (Grammar(json_schema='{"type": "string"}, "x": {}'), "not valid JSON"),
    ],
)
async def test_bad_grammars_are_refused_with_the_reason(
    checker: GrammarChecker, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(grammar, VOCAB, EOS)
    [violation] = caught.value.violations
    assert (violation.field, violation.value) == ("grammar", grammar.form)
    assert reason in violation.description


async def test_a_grammar_that_kills_its_reader_is_refused_and_the_next_is_read(
    checker: GrammarChecker,
) -> None:
    await checker.check(GOOD, VOCAB, EOS)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="nests too deeply"):
            await checker.check(chain(3500), VOCAB, EOS)
    await checker.check(Grammar(regex="next"), VOCAB, EOS)


async def test_a_base_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path / "tokenizer.json")
    try:
        with pytest.raises(Unsupported, match=r"no tokenizer\.json"):
            await checker.check(GOOD, VOCAB, EOS)
    finally:
        await checker.close()
