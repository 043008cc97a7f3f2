"""The screen of `loraplex top`: it fits, whatever there is to show."""

from __future__ import annotations

import dataclasses

import pytest

from loraplex.api.load import ModelLoad, RecentLoad
from loraplex.api.residency import WorkerLoad
from loraplex.cli.top import screen
from loraplex.client.generation import Status, WorkerStatus

RECENT = RecentLoad(
    window_s=60.0,
    requests=120,
    failures={"queue_full": 7, "deadline_infeasible": 2},
    prompt_tokens=6000,
    generated_tokens=12_000,
    first_token_p50_s=0.02,
    first_token_p95_s=0.2,
    duration_p50_s=1.5,
    duration_p95_s=3.0,
    models=tuple(ModelLoad(f"default/a{n:03d}", 100 - n, n, 10 * (100 - n)) for n in range(100)),
)


def _worker(number: int, *, is_away: bool = False) -> WorkerStatus:
    load = WorkerLoad(running_requests=number, free_blocks=25, idle_blocks=21, total_blocks=100)
    return WorkerStatus(f"worker-{number}", "a:1", "base", not is_away, not is_away, False, load, 9)


def _status(num_workers: int = 2) -> Status:
    workers = tuple(_worker(n, is_away=n == 0) for n in range(num_workers))
    return Status(True, "", ("base",), True, 511, 3, 4, workers, RECENT)


@pytest.mark.parametrize("num_workers", [0, 2, 50])
@pytest.mark.parametrize(("num_columns", "num_lines"), [(80, 23), (40, 10), (200, 60), (80, 5)])
def test_it_fits_the_terminal(num_workers: int, num_columns: int, num_lines: int) -> None:
    lines = screen(_status(num_workers), "t", num_columns, num_lines)
    assert len(lines) <= num_lines
    assert max(map(len, lines)) <= num_columns


def test_keys_are_named_on_a_terminal_only() -> None:
    assert screen(_status(), "t", 200, 60)[-1].startswith("keys: ")
    assert not any(line.startswith("keys: ") for line in screen(_status(), "t", 0, 60))


def test_it_shows_rates_latency_errors_and_the_worker_that_is_away_first() -> None:
    text = "\n".join(screen(_status(), "t", 0, 40))
    assert "2.0 requests/s, 200.0 generated tokens/s, 100.0 prompt tokens/s over 60 s" in text
    assert "first token p50 20.0 ms, p95 200.0 ms; whole request p50 1.50 s, p95 3.00 s" in text
    assert "errors    9: queue_full 7, deadline_infeasible 2" in text
    assert text.index("worker-0  unreachable") < text.index("worker-1  ready")
    assert "75%" in text and "21%" in text


@pytest.mark.parametrize(
    ("key", "first"), [("t", "a000"), ("r", "a000"), ("e", "a099"), ("n", "a000")]
)
def test_a_key_chooses_the_order_and_what_does_not_fit_is_counted(key: str, first: str) -> None:
    lines = screen(_status(), key, 0, 30)
    at = next(n for n, line in enumerate(lines) if line.startswith("ADAPTER"))
    assert lines[at + 1].startswith(f"default/{first}")
    shown = sum(line.startswith("default/") for line in lines)
    assert f"... and {100 - shown} more" in lines


def test_what_is_wrong_stands_in_the_first_line() -> None:
    status = dataclasses.replace(
        _status(), ready=False, not_ready_reason="no worker is ready", registry_connected=False
    )
    first = screen(status, "t", 0, 30)[0]
    assert "NOT READY: no worker is ready" in first and "REGISTRY UNREACHABLE" in first


def test_without_the_first_admin_key_it_says_what_is_missing() -> None:
    lines = screen(dataclasses.replace(_status(), recent=None), "t", 0, 30)
    assert lines[-1] == "Use the first admin key to see rates, errors and the adapters in use."
