"""The divergence of two answers from the most likely tokens that each of them names."""

from __future__ import annotations

import math
import random

import pytest

from loraplex.api.output import Candidate, TokenLogprob
from loraplex.client.divergence import (
    NUM_CANDIDATES,
    PROBE_TEXTS,
    divergence,
    divergence_at,
    probe_of,
)
from loraplex.errors import InvalidRequest


def distribution(rng: random.Random, size: int = 200) -> list[float]:
    values = [math.exp(rng.gauss(0, 2)) for _ in range(size)]
    return [value / sum(values) for value in values]


def answer(probabilities: list[float], token: int = 3) -> TokenLogprob:
    """As a gateway names them."""
    best = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[:NUM_CANDIDATES]
    top = tuple(Candidate(i, math.log(probabilities[i])) for i in best)
    return TokenLogprob(token, math.log(probabilities[token]), top)


def test_it_is_at_most_that_of_the_whole_vocabulary_and_zero_for_equals() -> None:
    rng = random.Random(0)
    for _ in range(200):
        p = distribution(rng)
        q = distribution(rng) if rng.random() < 0.5 else _near(p, rng)
        complete = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert 0 <= divergence_at(answer(p), answer(q)) <= complete + 1e-9
        assert divergence_at(answer(p), answer(p)) < 1e-12


def _near(p: list[float], rng: random.Random) -> list[float]:
    moved = [value * math.exp(rng.gauss(0, 0.1)) for value in p]
    return [value / sum(moved) for value in moved]


def test_answers_that_share_no_token_diverge_widely() -> None:
    one, other = [1e-6] * 100, [1e-6] * 100
    one[:20], other[40:60] = [0.05] * 20, [0.05] * 20
    for token in (3, 45, 90):
        assert divergence_at(answer(one, token), answer(other, token)) > 5


def test_it_counts_positions_and_equal_first_choices() -> None:
    rng = random.Random(1)
    same, p, q = distribution(rng), [0.6, 0.3, 0.1], [0.3, 0.6, 0.1]
    found = divergence(
        [None, answer(same), None, answer(p, 2)], [None, answer(same), None, answer(q, 2)]
    )
    expected = 0.6 * math.log(2) - 0.3 * math.log(2)
    assert (found.num_tokens, found.top1_agreement) == (2, 0.5)
    assert found.max_kl == pytest.approx(expected)
    assert found.mean_kl == pytest.approx(expected / 2)


@pytest.mark.parametrize(
    "others", [[None], [None, answer([0.5, 0.5], 0), answer([0.5, 0.5], 1)], [], [None, None]]
)
def test_answers_about_other_tokens_are_refused(others: list[TokenLogprob | None]) -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        divergence([None, answer([0.5, 0.5], 1)], others)


def test_a_probe_file_holds_texts_between_empty_lines() -> None:
    assert probe_of("a\nb\n\n\n c \n") == ("a\nb", " c ")
    with pytest.raises(InvalidRequest, match="must hold a text"):
        probe_of("\n \n\n")
    assert probe_of("\n\n".join(text for text in PROBE_TEXTS if "\n\n" not in text))
