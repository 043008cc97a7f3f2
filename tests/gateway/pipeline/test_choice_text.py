"""Tokens to text of one choice: the same however steps cut it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.output import FinishReason
from loraplex_services.gateway.pipeline.choice_text import ChoiceText
from loraplex_services.gateway.request import TextDelta, TextRules, Tokens
from loraplex_services.gateway.text.detokenize import TokenBytes
from tests.gateway.scripted_worker import experts_of
from tests.gateway.tiny_tokenizer import EOS_ID, byte_tokenizer

TOKENS = TokenBytes(byte_tokenizer())
IDS = st.lists(st.one_of(st.sampled_from(b"abc"), st.integers(0, 263)), min_size=1, max_size=20)


def _events(ids: list[int], cuts: list[int], finish: FinishReason) -> list[Tokens]:
    positions = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    events = []
    for start, end in itertools.pairwise(positions):
        last = finish if end == len(ids) else None
        stop_id = ids[-1] if last is FinishReason.STOP else None
        events.append(
            Tokens(tuple(ids[start:end]), start, finish_reason=last, stop_token_id=stop_id)
        )
    return events


def _text_deltas(events: list[Tokens], rules: TextRules) -> tuple[list[TextDelta], int]:
    choice, text_deltas = ChoiceText(0, TOKENS, rules), []
    for event in events:
        text_deltas.append(choice.add(event))
        if text_deltas[-1].finish_reason is not None:
            break
    return text_deltas, choice.num_tokens


@given(
    ids=IDS,
    cuts=st.lists(st.integers(1, 20)),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_result_does_not_depend_on_how_steps_cut_it(
    ids: list[int],
    cuts: list[int],
    stops: list[str],
    include: bool,
    min_tokens: int,
    finish: FinishReason,
) -> None:
    rules = TextRules(tuple(stops), include, True, min_tokens)
    (complete,), num_tokens = _text_deltas(_events(ids, [], finish), rules)
    text_deltas, num_streamed = _text_deltas(_events(ids, cuts, finish), rules)
    assert "".join(text_delta.text for text_delta in text_deltas) == complete.text
    assert (
        tuple(i for text_delta in text_deltas for i in text_delta.token_ids) == complete.token_ids
    )
    assert tuple(o for text_delta in text_deltas for o in text_delta.offsets) == complete.offsets
    last = text_deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (complete.finish_reason, complete.stop_reason)
    assert num_streamed == num_tokens == len(complete.token_ids)


def test_eos_is_counted_and_not_shown() -> None:
    (text_delta,), num_tokens = _text_deltas(
        _events([97, EOS_ID], [], FinishReason.STOP), TextRules()
    )
    assert (text_delta.text, text_delta.token_ids, num_tokens) == ("a", (97, EOS_ID), 2)


def test_stop_id_with_text_is_shown_only_when_asked() -> None:
    events = _events([97, 98], [], FinishReason.STOP)
    choice = ChoiceText(0, TOKENS, TextRules())
    text_delta = choice.add(events[0], stop_token_ids=(98,))
    assert (text_delta.text, text_delta.stop_reason) == ("a", 98)
    (shown,), _ = _text_deltas(events, TextRules(include_stop=True))
    assert shown.text == "ab"


def test_the_last_token_of_a_finished_grammar_is_shown() -> None:
    event = Tokens((97, 98), 0, finish_reason=FinishReason.STOP)
    text_delta = ChoiceText(0, TOKENS, TextRules()).add(event, stop_token_ids=(98,))
    assert (text_delta.text, text_delta.finish_reason, text_delta.stop_reason) == (
        "ab",
        "stop",
        None,
    )


def test_overrun_after_a_stop_string_is_neither_sent_nor_counted() -> None:
    rules = TextRules(("b",))
    (text_delta,), num_tokens = _text_deltas(
        _events([97, 98, 99, 99], [], FinishReason.LENGTH), rules
    )
    assert (text_delta.text, text_delta.token_ids, num_tokens) == ("a", (97, 98), 2)
    assert (text_delta.finish_reason, text_delta.stop_reason) == (FinishReason.STOP, "b")


def test_stop_strings_count_only_after_min_tokens() -> None:
    events = _events([97, 97, 97], [1, 2], FinishReason.LENGTH)
    text_deltas, _ = _text_deltas(events, TextRules(("a",), min_tokens=2))
    assert "".join(text_delta.text for text_delta in text_deltas) == "aa"


def test_a_stop_string_may_begin_within_min_tokens_but_not_end_there() -> None:
    events = _events(list(b"abcab"), [1, 2, 3, 4], FinishReason.LENGTH)
    for stops, min_tokens, shown in ((("bc",), 2, "a"), (("ab",), 2, "abc"), (("ab",), 5, "abcab"),
                                     (("ab", "abc"), 2, "")):  # fmt: skip
        text_deltas, _ = _text_deltas(events, TextRules(stops, min_tokens=min_tokens))
        assert "".join(text_delta.text for text_delta in text_deltas) == shown, (stops, min_tokens)


def test_half_a_character_is_flushed_at_the_end() -> None:
    (text_delta,), _ = _text_deltas(_events([97, 0xC3], [], FinishReason.LENGTH), TextRules())
    assert text_delta.text == "a\ufffd"


def test_tokens_after_a_stop_string_take_their_experts_along() -> None:
    """The experts of position p came with the token after it, so three tokens have two."""
    choice = ChoiceText(0, TOKENS, TextRules(stop=("c",)))
    merged = Tokens(tuple(b"abcde"), 0, routed_experts=experts_of(0, 14))  # a prompt of 10
    text_delta = choice.add(merged)
    assert text_delta.token_ids == tuple(b"abc")
    assert text_delta.routed_experts == experts_of(0, 12)
