"""The demo asks enough of everybody, notices every mix-up, and passes on the real stack."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from demo import run
from demo.run import Answer, adapter_folders, questions
from demo.skills import SKILLS
from demo.stack import StackFailed, running_stack

REPO = Path(__file__).parents[2]
NAMES = [folder.name for folder in adapter_folders()]


def test_asks_at_least_64_questions_of_at_least_8_adapters_interleaved() -> None:
    batch = questions(NAMES)
    assert len(NAMES) >= 8 and set(NAMES) <= set(SKILLS)
    assert len(batch) >= 64
    assert [question.adapter for question in batch[: len(NAMES)]] == NAMES


def test_an_answer_by_any_other_adapter_is_wrong() -> None:
    batch = questions(NAMES)
    for question in batch:
        text = question.prompt.removesuffix("=")
        for name in NAMES:
            answer = Answer(question, SKILLS[name].answer(text), 0.0, 0.0)
            assert answer.is_right == (name == question.adapter)


def test_a_stack_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    model = tmp_path / "empty"
    model.mkdir()
    with pytest.raises(StackFailed, match="whole log:"):
        with running_stack(model, "nothing", tmp_path / "state"):
            raise AssertionError("it started")


@pytest.fixture
def demo_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's folder with copied adapters, so that they may be spoiled, and its own state."""
    shutil.copytree(REPO / "demo" / "adapters", tmp_path / "adapters")
    (tmp_path / "base").symlink_to(REPO / "demo" / "base")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "STATE_DIR", tmp_path / "state")
    return tmp_path


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_demo_passes_and_prints_its_last_two_lines(
    demo_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main() == 0
    *_, largest, last = capsys.readouterr().out.splitlines()
    held = re.fullmatch(r"demo: largest step held (\d+) distinct adapters", largest)
    counts = re.fullmatch(r"demo: (\d+) requests, (\d+) adapters, (\d+) correct", last)
    assert held and int(held[1]) >= 8
    assert counts and counts[1] == counts[3] and int(counts[1]) >= 64 and int(counts[2]) >= 8


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_swapped_adapters_fail_the_demo(
    demo_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = demo_copy / "adapters"
    for name in NAMES[3:]:  # enough to tell two swapped ones from the others
        shutil.rmtree(adapters / name)
    first, second, _ = NAMES[:3]
    (adapters / first).rename(adapters / "kept")
    (adapters / second).rename(adapters / first)
    (adapters / "kept").rename(adapters / second)
    assert run.main() == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG") == 2 * run.NUM_PROMPTS
    assert printed.splitlines()[-1].endswith(f"3 adapters, {run.NUM_PROMPTS} correct")
