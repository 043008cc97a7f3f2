"""The reference shows the table of limits as it is."""

from __future__ import annotations

from loraplex_services.common import limits
from scripts import limits_page


def test_page_is_what_the_table_says() -> None:
    wanted = "\n".join(limits_page.page()) + "\n"
    hint = "run: python scripts/limits_page.py > docs/reference/limits.md"
    assert limits_page.PAGE.read_text() == wanted, hint


def test_page_shows_every_limit() -> None:
    counts = {name for name in vars(limits) if name.startswith("MAX_")}
    numbers = {n for n, value in vars(limits).items() if isinstance(value, limits.NumberLimits)}
    assert counts == set(limits_page.COUNTS)
    assert numbers == set(limits_page.NUMBERS)
