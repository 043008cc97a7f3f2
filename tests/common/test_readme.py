"""The README's table of settings is the code's."""

from pathlib import Path

from services.common.variables import markdown_table

README = Path(__file__).parents[2] / "README.md"


def test_the_table_of_settings_is_the_one_in_the_code() -> None:
    text = README.read_text()
    begin = "<!-- settings: written from services/common/env.py -->\n"
    table = text.split(begin)[1].split("<!-- end of settings -->")[0]
    assert table.strip() == markdown_table().strip()
