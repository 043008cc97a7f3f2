"""Stop strings are found however the text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loraplex_services.gateway.pipeline.choice_text import StopScanner

TEXTS = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def _reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first place where any stop string is complete."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def _scanned(text_deltas: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    scanner = StopScanner(tuple(stops), include=include)
    out = ""
    for text_delta in text_deltas:
        scan = scanner.push(text_delta)
        out += scan.text
        if scan.matched is not None:
            return out, scan.matched
    return out + scanner.flush(), None


@given(text=TEXTS, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 30)))
def test_result_does_not_depend_on_the_cuts(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    positions = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    text_deltas = [text[a:b] for a, b in pairwise(positions)]
    assert _scanned(text_deltas, stops, include) == _reference(text, stops, include)


@given(text=TEXTS, stops=STOPS)
def test_nothing_is_held_back_without_need(text: str, stops: list[str]) -> None:
    scanner = StopScanner(tuple(stops))
    out = ""
    for char in text:
        scan = scanner.push(char)
        if scan.matched is not None:
            return
        out += scan.text
    held = scanner.flush()
    assert out + held == text
    assert held == "" or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_text_passes() -> None:
    scanner = StopScanner(())
    assert scanner.push("anything").text == "anything"
    assert scanner.flush() == ""


def test_longest_of_two_that_end_together_wins() -> None:
    assert _scanned(["xab"], ["b", "ab"], False) == ("x", "ab")
    assert _scanned(["xab"], ["b", "ab"], True) == ("xab", "ab")
