"""The checks of grammars, with its real process. No torch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.api.sampling import Grammar
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.common.limits import GRAMMARS
from loraplex_services.common.processes import process_pool
from loraplex_services.common.processes.process_pool import JobFailed
from loraplex_services.worker.grammars.checker import GrammarChecker
from loraplex_services.worker.grammars.compiling import (
    MAX_GRAMMAR_BYTES,
    MAX_OPTIONS,
    compile_grammar,
    read_vocabulary,
)

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


async def test_good_grammars_of_every_form_pass(checker: GrammarChecker) -> None:
    for grammar in (
        GOOD,
        Grammar(choice=("", 'quo"te', "back\\slash", "line\nbreak", "日本")),
        Grammar(ebnf='start: word+\nword: /[a-z]+/ " "'),
        Grammar(json_schema='{"$defs":{"t":{"items":{"$ref":"#/$defs/t"}}},"$ref":"#/$defs/t"}'),
        Grammar(json_schema="true"),
        chain(50),
    ):
        await checker.check(grammar, VOCAB, EOS)


GBNF = """\
root ::= select-statement # as in vLLM's examples
select-statement ::= "SELECT " column " from " [a-z]+ (" where " column)?
column ::= "col_1" | "col_2"
"""


async def test_a_grammar_in_gbnf_becomes_one_in_larks_notation(checker: GrammarChecker) -> None:
    vocabulary = read_vocabulary(TOKENIZER, VOCAB, EOS)
    readable = await checker.check(Grammar(ebnf=GBNF), VOCAB, EOS)
    assert await checker.check(readable, VOCAB, EOS) == readable
    for text, is_accepted in (
        ("SELECT col_1 from tables", True),
        ("SELECT col_2 from t where col_1", True),
        ("SELECT col_3 from t", False),
        ("SELECT col_1 from T", False),
    ):
        matcher = compile_grammar(readable, vocabulary)
        num_matched = matcher.try_consume_tokens(list(text.encode()))
        assert (num_matched == len(text) and matcher.is_accepting()) is is_accepted, text


async def test_a_grammar_in_larks_notation_reaches_the_engine_as_it_was_written(
    checker: GrammarChecker,
) -> None:
    """A mark of GBNF within a text does not make it GBNF."""
    grammar = Grammar(ebnf='start: rule+\nrule: "a" | "b ::= c"')
    assert await checker.check(grammar, VOCAB, EOS) is grammar


BAD = [
    (Grammar(), "set one of json_schema"),
    (Grammar(choice=()), "no options"),
    (Grammar(choice=("a",) * (MAX_OPTIONS + 1)), "options"),
    (Grammar(regex="a" * (MAX_GRAMMAR_BYTES + 1)), "bytes"),
    (Grammar(json_schema='{"a": NaN}'), "not valid JSON"),
    (Grammar(json_schema="[" * 100_000), "nested too deeply"),
    (Grammar(json_schema="false"), "is an object"),
    (Grammar(json_schema=json.dumps({"$ref": "http://example.com/x"})), "fetch"),
    (Grammar(json_schema='{"type": "string"}, "x": {}'), "not valid JSON"),
    (Grammar(ebnf='start ::= "a"'), "not valid GBNF: No 'root' rule found"),
    (Grammar(ebnf="root ::= a-b"), "not valid GBNF: Rule 'a-b' not found"),
    (Grammar(ebnf='root ::= "\\q"'), "Invalid escape sequence"),
    (Grammar(ebnf="root ::= " + "(" * 5000), "nests too deeply"),
]
"""Grammars, and what is said of them."""


async def test_bad_grammars_are_refused_with_the_reason(checker: GrammarChecker) -> None:
    for grammar, reason in BAD:
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


@pytest.mark.hostile
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc says what is allocated")
async def test_a_grammar_that_takes_much_memory_compiled_is_refused(
    checker: GrammarChecker,
) -> None:
    with pytest.raises(InvalidRequest, match=r"takes \d+ MiB compiled, and at most 16"):
        await checker.check(slow(100_003), VOCAB, EOS)
    await checker.check(GOOD, VOCAB, EOS)


async def test_a_base_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path / "tokenizer.json")
    try:
        with pytest.raises(Unsupported, match=r"no tokenizer\.json"):
            await checker.check(GOOD, VOCAB, EOS)
    finally:
        await checker.close()


def slow(number: int = 900_001) -> Grammar:
    """A schema of a few bytes that takes seconds to compile."""
    return Grammar(json_schema=json.dumps({"type": "integer", "multipleOf": number}))


@pytest.fixture
async def impatient() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(TOKENIZER, replace(GRAMMARS, timeout_s=0.3))
    yield checker
    await checker.close()


@pytest.mark.hostile
async def test_hard_grammars_of_one_tenant_do_not_delay_the_grammars_of_another(
    checker: GrammarChecker,
) -> None:
    await checker.check(GOOD, VOCAB, EOS, "acme")
    hard = [
        asyncio.create_task(checker.check(slow(900_001 + 2 * n), VOCAB, EOS, "globex"))
        for n in range(4)
    ]
    await asyncio.sleep(0)
    for word in ("one", "two", "three"):
        await checker.check(Grammar(regex=word), VOCAB, EOS, "acme")
    assert not all(task.done() for task in hard), "they are first in line, and not served first"
    for task in hard:
        task.cancel()
    await asyncio.gather(*hard, return_exceptions=True)


@pytest.mark.hostile
async def test_a_grammar_that_ran_out_of_time_is_refused_without_another_try(
    impatient: GrammarChecker,
) -> None:
    with pytest.raises(InvalidRequest, match="takes too long"):
        await impatient.check(slow(), VOCAB, EOS)
    pool = impatient._pool
    assert pool is not None
    with pytest.raises(JobFailed) as caught:
        await pool.ask("", b"not even a grammar", slow())
    assert caught.value.is_repeated


@pytest.mark.hostile
async def test_a_grammar_is_bounded_by_its_processor_time_however_long_it_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_pool, "PAUSE_FACTOR", 0.0)
    checker = GrammarChecker(TOKENIZER, replace(GRAMMARS, timeout_s=600.0))
    try:
        with pytest.raises(InvalidRequest, match="takes too long"):
            await checker.check(slow(), VOCAB, EOS)
        await checker.check(GOOD, VOCAB, EOS)
    finally:
        await checker.close()


@pytest.mark.hostile
async def test_grammars_of_requests_that_were_cancelled_are_not_compiled(
    checker: GrammarChecker,
) -> None:
    await checker.check(GOOD, VOCAB, EOS)
    grammars = [slow(900_001 + 2 * n) for n in range(6)]
    left = [
        asyncio.create_task(checker.check(grammar, VOCAB, EOS, "globex")) for grammar in grammars
    ]
    await asyncio.sleep(0.05)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await checker.check(Grammar(regex="after"), VOCAB, EOS, "globex")
    pool = checker._pool
    assert pool is not None
    tried = [grammar for grammar in grammars if pool._refused.get(grammar)]
    assert tried == [], "each that is compiled runs out of time, which is remembered"
