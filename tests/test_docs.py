"""What the documents name is there: links, files, modules, targets, variables, commands."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import summaries
from loraplex.cli import loraplex, registry
from loraplex.cli.parsing import spelled_out
from loraplex_services.common.settings import env
from loraplex_services.simulate import flags as simulate
from loraplex_services.up import flags as up
from tests.metrics import exported

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(path for top in ("demo", "docs", "services") for path in (ROOT / top).rglob("*.md")),
]
PACKAGES = "benchmarks|demo|loraplex|loraplex_services|scripts|services|tests"
VARIABLES = {setting.name for setting in env.ALL_SETTINGS} | {"AWS_ENDPOINT_URL_S3"}
BENCHMARKS = summaries()
PARSERS = {
    "registry": registry.make_parser,
    "loraplex": loraplex.make_parser,
    "loraplex up": up.make_parser,
    "loraplex simulate": simulate.make_parser,
}
MOST_CHARACTERS = 800
"""Of a row of docs/experiments.md."""


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def _anchor(heading: str) -> str:
    """As GitHub names it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not link.startswith(("https://", "http://")):
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), link
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
            assert not anchor or anchor in map(_anchor, headings), link


def test_modules_and_targets_are_there(document: Path) -> None:
    text = document.read_text()
    for module in re.findall(rf"python -m ((?:{PACKAGES})\.[\w.]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    named = re.findall(r"python -m benchmarks run ([\w.]*\w)", text)
    assert [name for name in named if name not in BENCHMARKS] == []
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"(?:`|^|\s\s)make ([a-z][\w-]*)", text, re.M):
        assert target in targets, target


def test_files_of_ours_are_there(document: Path) -> None:
    named = re.findall(rf"`((?:{PACKAGES}|docs|deploy)/[\w./-]*\w)[`\s,:]", document.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_no_merge_was_left_unfinished(document: Path) -> None:
    assert re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", document.read_text(), re.M) == []


def test_variables_are_known(document: Path) -> None:
    named = set(re.findall(r"\bLORAPLEX_[A-Z0-9_]*[A-Z0-9]\b", document.read_text()))
    assert [name for name in named if not {name, name.removesuffix("_FILE")} & VARIABLES] == []


def _command_lines(text: str) -> Iterator[list[str]]:
    """The words of each call of `registry` and `loraplex`, but of synopses with `[--flag]`."""
    for line in text.replace("\\\n", " ").splitlines():
        call = re.match(r"(?:\$ )?(?:\.venv/bin/)?((?:registry|loraplex) .*)", line.strip())
        if call and " [" not in call[1]:
            for part in re.split(r" && | \| |; | > ", call[1]):
                words = shlex.split(part, comments=True)
                if words and words[0] in PARSERS:
                    yield words


def _check(words: list[str]) -> None:
    name = " ".join(words[:2]) if " ".join(words[:2]) in PARSERS else words[0]
    PARSERS[name]().parse_args(spelled_out(words[len(name.split()) :]))


def test_commands_are_accepted(document: Path) -> None:
    for fence in re.findall(r"^ *```\w*\n(.*?)^ *```", document.read_text(), re.M | re.S):
        for words in _command_lines(fence):
            _check(words)


def _every(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _every(child)


@pytest.mark.parametrize("name", PARSERS)
def test_the_examples_in_help_are_accepted(name: str) -> None:
    checked = [
        words for parser in _every(PARSERS[name]()) for words in _command_lines(parser.epilog or "")
    ]
    assert checked
    for words in checked:
        _check(words)


def test_reasons_of_errors_are_explained_and_no_others() -> None:
    packages = [path for top in ("loraplex", "services") for path in (ROOT / top).rglob("*.py")]
    source = "\n".join(path.read_text() for path in packages)
    runbooks = (ROOT / "docs" / "operate" / "runbooks.md").read_text()
    document = runbooks.partition("## Errors by reason")[2]
    explained = {name for name in re.findall(r"`([A-Z_]{4,})`", document) if name not in VARIABLES}
    assert set(re.findall(r"\breason ?= ?\"([A-Z_]+)\"", source)) <= explained
    assert [name for name in explained if f'"{name}"' not in source] == []


def test_every_metric_is_in_the_reference_and_no_others() -> None:
    served = {metric.name + "_total" * (metric.kind == "counter") for metric in exported()}
    document = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert served == set(re.findall(r"`((?:vllm:|loraplex_[a-z]+_)[a-z0-9_]+)`", document))


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "internals" / "adr"
    index = (folder / "README.md").read_text()
    records = list(folder.glob("[0-9]*.md"))
    assert records
    for record in records:
        title = record.read_text().partition("\n")[0].partition(". ")[2]
        assert f"[{title}]({record.name})" in index


def test_no_row_of_the_experiments_runs_on() -> None:
    """A reader takes in a question, two or three sentences with figures, and a verdict."""
    page = (ROOT / "docs" / "experiments.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| 20")]
    assert rows
    assert [row[:100] for row in rows if len(row) > MOST_CHARACTERS] == []


def test_the_tests_behind_expectations_exist() -> None:
    page = (ROOT / "docs" / "internals" / "expectations.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert named
    for path, name in named:
        assert re.search(rf"def {name}\(", (ROOT / path).read_text()), f"{path}::{name}"


def test_what_the_map_points_at_is_there() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where is...")[2]
    rows = re.findall(r"^\|[^|]*\| ?(.*?) ?\|", section.partition("\n## ")[0], re.M)[2:]
    assert rows
    for row in rows:
        found = re.fullmatch(r"`([\w/]+\.py)` \(`([\w.]+)`\)", row)
        assert found, row
        source = (ROOT / found[1]).read_text()
        for name in found[2].split("."):
            defined = rf"^ *(?:(?:async )?def|class) {name}\b|^{name}\b.*="
            assert re.search(defined, source, re.M), row
