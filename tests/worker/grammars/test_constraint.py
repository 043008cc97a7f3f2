"""Tokens and ends that only an adapter has, under a grammar. No torch, no model."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loraplex.api.sampling import Grammar, GrammarTokens
from loraplex.errors import InvalidRequest
from loraplex_services.worker.grammars.compiling import compile_grammar, read_vocabulary
from loraplex_services.worker.grammars.constraint import AdapterMatcher, GrammarConstraint, resume

TOKENIZER = Path(__file__).parents[3] / "demo" / "base" / "tokenizer.json"
VOCAB, EOS = 264, 257
ADDED = {300: '"name"', 301: "true", 302: ", ", 303: "abab", 304: "é}", 305: "b"}
OWN_EOS = 306


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module")
def vocabulary():
    return read_vocabulary(TOKENIZER, VOCAB, [EOS])


def follower(vocabulary, grammar, own):
    return AdapterMatcher(compile_grammar(grammar, vocabulary), vocabulary, own, [EOS])


def ids_in(mask: bytes) -> set[int]:
    return {
        8 * index + bit for index, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1
    }


def text_of(ids) -> str:
    parts = (ADDED[i].encode() if i in ADDED else bytes([i]) for i in ids)
    return b"".join(parts).decode()


def test_an_added_token_may_come_where_its_text_may(vocabulary):
    own = GrammarTokens(tuple(ADDED.items()))
    index = follower(vocabulary, Grammar(regex="(ab){2,4}"), own)
    assert ids_in(index.bitmask()) == {ord("a"), 303}
    assert index.consume([ord("a")])
    assert ids_in(index.bitmask()) == {ord("b"), 305}
    assert index.consume([305, 303])
    assert ids_in(index.bitmask()) == {ord("a"), EOS}
    assert not index.consume([303])


def test_its_own_end_replaces_that_of_the_base(vocabulary):
    own = GrammarTokens(tuple(ADDED.items()), (OWN_EOS, 258))
    index = follower(vocabulary, Grammar(regex="(ab){2,}"), own)
    assert not {OWN_EOS, 258, EOS} & ids_in(index.bitmask())
    assert index.consume([303])
    assert ids_in(index.bitmask()) == {ord("a"), 303, 258, OWN_EOS}
    assert index.consume([OWN_EOS])
    assert index.is_finished
    early = follower(vocabulary, Grammar(regex="(ab){2,}"), own)
    assert not early.consume([OWN_EOS])


@pytest.mark.parametrize("seed", range(20))
def test_walks_of_any_tokens_keep_to_the_grammar_and_resume_where_they_were(
    vocabulary, executor, seed
):
    pattern = r'\{("name", (true|false|"[a-zé}]{0,4}")(, )?){1,3}(ab)*é?\}'
    grammar, rng = Grammar(regex=pattern), random.Random(seed)
    own = GrammarTokens(tuple(ADDED.items()), (OWN_EOS,))
    walk = GrammarConstraint(grammar, follower(vocabulary, grammar, own), executor.submit)
    ids: list[int] = []
    while not walk.is_finished and len(ids) < 200:
        choices = sorted(ids_in(walk.bitmask()))
        added = [i for i in choices if i >= 300]
        again = follower(vocabulary, grammar, own)
        resume(again, grammar, ids)
        assert sorted(ids_in(again.bitmask())) == choices
        ids.append(rng.choice(added if added and rng.random() < 0.7 else choices))
        walk.advance(ids[-1:])
    assert walk.is_finished
    assert re.fullmatch(pattern, text_of(i for i in ids if i != OWN_EOS))
    assert any(i in ADDED for i in ids)
    with pytest.raises(InvalidRequest):
        resume(follower(vocabulary, grammar, own), grammar, ids)
