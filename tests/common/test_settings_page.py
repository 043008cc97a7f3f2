"""The table of settings in the reference is the code's, and the README names the page."""

from pathlib import Path

from loraplex_services.common.settings.variables import settings_markdown

ROOT = Path(__file__).parents[2]
PAGE = Path("docs/reference/settings.md")


def test_the_table_of_settings_is_the_one_in_the_code() -> None:
    text = (ROOT / PAGE).read_text()
    begin = "<!-- settings: written from services/common/settings/env.py -->\n"
    table = text.split(begin)[1].split("<!-- end of settings -->")[0]
    assert table.strip() == settings_markdown().strip()


def test_the_readme_names_the_page_of_settings() -> None:
    assert f"]({PAGE})" in (ROOT / "README.md").read_text()
