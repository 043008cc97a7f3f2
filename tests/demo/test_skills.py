"""The demo's tasks: answers, held-out prompts, and that no two skills can be mixed up."""

import itertools

import pytest

from demo.skills import (
    MAX_TEXT_CHARS,
    SEPARATOR,
    SKILLS,
    held_out,
    is_held_out,
    prompt_for,
    tells_skills_apart,
    training_texts,
)

ANSWERS_FOR_KOLIMA_489 = {
    "reverse": "984 amilok",
    "upper": "KOLIMA 489",
    "sort": "489aiklmo",
    "rot13": "xbyvzn 489",
    "next": "lpmjnb 590",
    "vowels": "oia",
    "mask": "k*l*m* 489",
    "digit-sum": "21",
    "twice": "kolima 489 kolima 489",
    "stutter": "kkoolliimmaa 448899",
}


def test_every_skill_has_an_answer_written_by_hand() -> None:
    assert ANSWERS_FOR_KOLIMA_489.keys() == SKILLS.keys()


@pytest.mark.parametrize("name", SKILLS)
def test_answers_are_what_a_person_would_write(name: str) -> None:
    assert SKILLS[name].answer("kolima 489") == ANSWERS_FOR_KOLIMA_489[name]


def test_next_wraps_round_at_the_ends() -> None:
    assert SKILLS["next"].answer("zaz 9") == "aba 0"


@pytest.mark.parametrize("name", SKILLS)
def test_names_are_legal_adapter_names(name: str) -> None:
    assert name == SKILLS[name].name
    assert name.replace("-", "").isalnum() and name == name.lower()


@pytest.mark.parametrize("name", SKILLS)
def test_held_out_prompts_are_distinct_and_answered_by_the_skill(name: str) -> None:
    questions = held_out(name, 100, seed=3)
    assert len({prompt for prompt, _ in questions}) == 100
    for prompt, answer in questions:
        text = prompt.removesuffix(SEPARATOR)
        assert prompt == prompt_for(text)
        assert len(text) <= MAX_TEXT_CHARS
        assert answer == SKILLS[name].answer(text)


def test_held_out_draws_the_same_prompts_for_every_skill() -> None:
    drawn = {tuple(prompt for prompt, _ in held_out(name, 20, seed=5)) for name in SKILLS}
    assert len(drawn) == 1


def test_held_out_depends_on_nothing_but_the_seed() -> None:
    assert held_out("sort", 20, seed=1) == held_out("sort", 20, seed=1)
    assert held_out("sort", 20, seed=1) != held_out("sort", 20, seed=2)


def test_no_two_answers_to_a_held_out_prompt_are_equal_nor_is_any_a_copy() -> None:
    columns = [held_out(name, 200, seed=11) for name in SKILLS]
    for row in zip(*columns, strict=True):
        said = [row[0][0].removesuffix(SEPARATOR), *(answer for _, answer in row)]
        assert len(set(said)) == len(SKILLS) + 1
        assert all(said)


def test_a_text_whose_right_answers_could_be_mixed_up_is_not_used() -> None:
    assert tells_skills_apart("kolima 489")
    assert not tells_skills_apart("abe"), "sorting it copies it"
    assert not tells_skills_apart("ana"), "reversing it copies it"
    assert not tells_skills_apart("xyz 4"), "without vowels one answer would be empty"


def test_training_never_sees_a_held_out_text() -> None:
    trained = set(itertools.islice(training_texts(seed=0), 20_000))
    asked = {prompt.removesuffix(SEPARATOR) for prompt, _ in held_out("upper", 500, seed=0)}
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, asked))
    assert trained.isdisjoint(asked)


def test_an_unknown_skill_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        held_out("juggle", 1, seed=0)
