"""What every service does before and after it serves."""

from __future__ import annotations

import resource

import pytest

from loraplex.errors import InvalidRequest, Unavailable
from loraplex_services.common.processes.process import run_service


async def _raise(error: Exception) -> None:
    raise error


async def _return() -> None:
    return None


@pytest.mark.parametrize(
    ("service", "own", "foreign"),
    [
        ("registry", "LORAPLEX_OBJECTS", "LORAPLEX_KV_MEMORY"),
        ("gateway", "LORAPLEX_HTTP_LISTEN", "LORAPLEX_KV_MEMORY"),
        ("worker", "LORAPLEX_KV_MEMORY", "LORAPLEX_HTTP_LISTEN"),
    ],
)
def test_help_lists_the_variables_of_the_service_and_starts_nothing(
    service: str, own: str, foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run_service(service, lambda: _raise(AssertionError("must not start")), ["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert own in shown and "LORAPLEX_DRAIN_S [20]" in shown
    assert foreign not in shown


def test_arguments_are_refused() -> None:
    with pytest.raises(SystemExit) as left:
        run_service("worker", _return, ["--kv-memory=1GiB"])
    assert left.value.code == 2


def test_a_bad_log_level_names_its_switch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORAPLEX_DEBUG", "log-level=loud")
    assert run_service("gateway", _return, []) == 2
    assert "log-level" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidRequest.field("LORAPLEX_X", "1", "expected 2"), 2), (Unavailable("away"), 6)],
)
def test_the_exit_status_tells_what_went_wrong(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_service("registry", lambda: _raise(error), []) == status
    assert str(error) in capsys.readouterr().err


def test_a_service_may_open_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    try:
        assert run_service("gateway", _return, []) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
