"""Text of flags and variables becomes values, or a sentence that says what is accepted."""

import pytest

from loraplex_services.common.units import integer, parse_listen


def test_integers_have_bounds() -> None:
    assert integer(1, 4)("4") == 4
    for text in ("0", "5", "1.5", "-1", "x"):
        with pytest.raises(ValueError, match="at least 1 and at most 4"):
            integer(1, 4)(text)


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::]:8080", "unix:/run/x.sock"])
def test_listen_addresses(text: str) -> None:
    assert parse_listen(text) == text


@pytest.mark.parametrize(
    "text", ["8080", ":8080", "host:", "host:99999", "host:\u0668", "unix:relative"]
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_listen(text)
