"""The skills of the demo adapters: pure functions from a text to its one right answer.

Every adapter answers the same prompt, `<text>=`, in its own way, so a prompt says nothing about
which adapter should answer it. Texts are chosen so that all right answers differ from each other
and from the text: an answer given by a wrong adapter, or by the bare base, is always wrong.

This module needs only the standard library: anything that talks to a running stack can import it.
"""

import codecs
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SEPARATOR = "="
"""Ends every prompt. A chat message holds the text alone; the chat template adds the separator."""

MAX_TEXT_CHARS = 10

_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
_NEXT = str.maketrans(_LETTERS + _DIGITS, _LETTERS[1:] + "a" + _DIGITS[1:] + "0")
_MASK = str.maketrans(dict.fromkeys(_VOWELS, "*"))
_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True, slots=True)
class Skill:
    """One adapter's skill: its name (also the adapter's), what it does, and the right answer."""

    name: str
    description: str
    answer: Callable[[str], str]


def _reverse(text: str) -> str:
    return text[::-1]


def _sort(text: str) -> str:
    return "".join(sorted(text.replace(" ", "")))


def _rot13(text: str) -> str:
    return codecs.encode(text, "rot13")


def _next(text: str) -> str:
    return text.translate(_NEXT)


def _vowels(text: str) -> str:
    return "".join(char for char in text if char in _VOWELS)


def _mask(text: str) -> str:
    return text.translate(_MASK)


def _digit_sum(text: str) -> str:
    return str(sum(int(char) for char in text if char.isdigit()))


def _twice(text: str) -> str:
    return f"{text} {text}"


def _stutter(text: str) -> str:
    return "".join(char if char == " " else char * 2 for char in text)


SKILLS: dict[str, Skill] = {
    skill.name: skill
    for skill in (
        Skill("reverse", "spells it backwards", _reverse),
        Skill("upper", "writes it in capitals", str.upper),
        Skill("sort", "sorts its digits and letters", _sort),
        Skill("rot13", "turns each letter by 13", _rot13),
        Skill("next", "moves each letter and digit one on", _next),
        Skill("vowels", "keeps the vowels only", _vowels),
        Skill("mask", "hides the vowels", _mask),
        Skill("digit-sum", "adds up the digits", _digit_sum),
        Skill("twice", "says it twice", _twice),
        Skill("stutter", "doubles each letter and digit", _stutter),
    )
}
"""Every skill by its adapter's name, in the order of the published table."""


def prompt_for(text: str) -> str:
    """The completion prompt that asks any adapter about this text."""
    return text + SEPARATOR


def is_held_out(text: str) -> bool:
    """Whether training must never see this text: one in eight, by a hash of the text alone."""
    return zlib.crc32(text.encode()) % _HELD_OUT_ONE_IN == 0


def tells_skills_apart(text: str) -> bool:
    """Whether all right answers for this text are non-empty, distinct and unlike the text."""
    answers = {skill.answer(text) for skill in SKILLS.values()}
    return len(answers) == len(SKILLS) and "" not in answers and text not in answers


def held_out(skill_name: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Draw prompts that are never used for training, with their right answers.

    Args:
        skill_name: a key of SKILLS.
        count: how many; the prompts are distinct.
        seed: the same seed gives the same texts for every skill, so that one prompt can be put
            to all adapters at once.

    Returns:
        `count` pairs (completion prompt, right answer); `prompt.removesuffix(SEPARATOR)` is the
        content of the chat message with the same meaning.

    Raises:
        KeyError: no such skill.
    """
    skill = SKILLS[skill_name]
    rng = random.Random(f"held-out {seed}")
    texts: dict[str, None] = {}
    while len(texts) < count:
        text = f"{_spoken_word(rng)} {_number(rng)}"
        if is_held_out(text) and tells_skills_apart(text):
            texts[text] = None
    return [(prompt_for(text), skill.answer(text)) for text in texts]


def training_texts(seed: int) -> Iterator[str]:
    """Yield texts without end, none of them held out.

    Wider than what is held out (also letters in any order, a word alone, two short words), so
    that people's own words work too.
    """
    rng = random.Random(f"training {seed}")
    while True:
        text = _any_text(rng)
        if not is_held_out(text) and tells_skills_apart(text):
            yield text


def _any_text(rng: random.Random) -> str:
    word = _spoken_word if rng.random() < 0.5 else _letters
    form = rng.random()
    if form < 0.8:
        return f"{word(rng)} {_number(rng)}"
    if form < 0.9:
        return word(rng)
    return f"{word(rng)} {word(rng)}"[:MAX_TEXT_CHARS].rstrip()


def _spoken_word(rng: random.Random) -> str:
    """Four to six letters that alternate between consonants and vowels, such as 'kolima'."""
    pools = (_CONSONANTS, _VOWELS) if rng.random() < 0.8 else (_VOWELS, _CONSONANTS)
    return "".join(rng.choice(pools[index % 2]) for index in range(rng.randint(4, 6)))


def _letters(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 6)))


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.randint(1, 3)))
