"""Bytes, times and counts as people write them."""

import pytest

from loraplex.units import counted, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1k", 1000),
        ("1KiB", 1024),
        ("24MiB", 24 << 20),
        ("1.5G", 1_500_000_000),
        ("2 GiB", 2 << 30),
        ("1tb", 10**12),
    ],
)
def test_bytes_take_suffixes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1iB", "1e9", "24 potatoes"])
def test_other_bytes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="24MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "value"), [("20", 20.0), ("500ms", 0.5), ("5m", 300.0)])
def test_seconds_take_suffixes(text: str, value: float) -> None:
    assert parse_seconds(text) == value


@pytest.mark.parametrize("text", ["", "5 minutes", "-3", "nan", "inf"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="500ms"):
        parse_seconds(text)


def test_one_thing_is_not_written_in_the_plural() -> None:
    assert [counted(count, "tensor") for count in (0, 1, 2)] == [
        "0 tensors",
        "1 tensor",
        "2 tensors",
    ]
    assert [counted(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]
