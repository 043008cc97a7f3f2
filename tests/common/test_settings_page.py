"""The table of settings in the reference is the code's, and the README names the page."""

from scripts import write_settings


def test_the_table_of_settings_is_the_one_in_the_code() -> None:
    text = write_settings.PAGE.read_text()
    found = text.split(write_settings.BEGIN)[1].split(write_settings.END)[0]
    assert found.strip() == write_settings.table().strip(), "run: python scripts/write_settings.py"


def test_the_readme_names_the_page_of_settings() -> None:
    page = write_settings.PAGE.relative_to(write_settings.ROOT)
    assert f"]({page})" in (write_settings.ROOT / "README.md").read_text()
