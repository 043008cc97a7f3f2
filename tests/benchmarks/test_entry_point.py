"""`python -m benchmarks`: what it lists can be run, and what can be run is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import __main__ as entry_point

FOLDER = Path(entry_point.__file__).parent


def test_every_listed_benchmark_is_a_program() -> None:
    known = entry_point.summaries()
    assert len(known) > 25
    for name, summary in known.items():
        source = (FOLDER / f"{name.replace('.', '/')}.py").read_text()
        assert 'if __name__ == "__main__":' in source, name
        assert summary, name


def test_every_benchmark_stands_under_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry_point.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert [name for name in entry_point.summaries() if f"  {name} " not in listed] == []


def test_the_quick_benchmarks_exist() -> None:
    assert set(entry_point.QUICK) <= set(entry_point.summaries())


def test_one_that_fails_does_not_keep_the_others_from_running(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    unknown = ["--no-such-flag"]
    monkeypatch.setattr(
        entry_point,
        "QUICK",
        {"serving.gateway": (unknown, 1), "registry.shadow_test": (unknown, 1)},
    )
    assert entry_point.main(["quick"]) == 2
    ran = capfd.readouterr().out
    assert "serving.gateway took" in ran and "registry.shadow_test took" in ran


def test_an_unknown_name_is_refused_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert entry_point.main(["run", "cpu.decoder"]) == 2
    assert "cpu.decode" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["run"], ["ls"], ["list", "extra"]])
def test_a_wrong_command_line_prints_the_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry_point.main(argv) == 2
    assert "python -m benchmarks run" in capsys.readouterr().err
