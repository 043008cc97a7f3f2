"""`loraplex bench trace` against the real stack: every request is served and counted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.stack import ADAPTERS, Stack

SHORT = ("--rate", "10", "--duration", "2", "--lengths", "4-16,2-8", "--arrivals", "pooled")


def bench(stack: Stack, *args: str) -> subprocess.CompletedProcess[str]:
    return stack.run_loraplex("bench", "trace", *SHORT, *args, "--registry", stack.registry)


def test_published_adapters_serve_the_whole_trace_and_the_figures_follow_from_its_outcomes(
    stack: Stack, tmp_path: Path
) -> None:
    path = tmp_path / "outcomes.jsonl"
    done = bench(stack, "--adapters", str(len(ADAPTERS)), "--outcomes", str(path), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_finished"] == result["num_requests"] == 20
    assert result["failures"] == {} and result["output_tokens_per_s"] > 0
    assert 0 < result["first_token"]["p50_s"] <= result["latency"]["p50_s"]
    outcomes = [json.loads(line) for line in path.read_text().splitlines()]
    waits_s = sorted(outcome["first_token_s"] - outcome["arrival_s"] for outcome in outcomes)
    assert result["first_token"]["p50_s"] == waits_s[9]
    assert result["makespan_s"] == max(outcome["end_s"] for outcome in outcomes)
    assert all(0 <= o["adapter"] < len(ADAPTERS) and 4 <= o["num_input"] <= 16 for o in outcomes)


def test_results_that_cannot_be_written_are_reported_before_anything_is_sent(stack: Stack) -> None:
    done = bench(stack, "--adapters", "0", "--outcomes", "/no/such/folder/outcomes.jsonl")
    assert done.returncode == 2 and "--outcomes" in done.stderr


@pytest.mark.long
def test_prepared_adapters_are_as_many_distinct_ones_as_asked_for(
    stack: Stack, tmp_path: Path
) -> None:
    prepare = ("--adapters", "12", "--prepare-from", str(ADAPTERS[0].parent))
    done = bench(stack, *prepare, "--keep")
    assert done.returncode == 0, done.stderr
    assert "published 12 adapters" in done.stderr
    assert "20 of 20 requests" in done.stdout and "first token" in done.stdout
    listed = stack.run_registry("list", "--json").stdout.splitlines()
    versions = [json.loads(line) for line in listed]
    trace = [version for version in versions if version["name"].startswith("trace-")]
    assert len(trace) == len({version["digest"] for version in trace}) == 12
    stack.run_registry("delete", "trace-*", "--all")
    done = bench(stack, *prepare)
    assert "deleted 12 adapters" in done.stderr
    assert "trace-" not in stack.run_registry("list", "--json").stdout


def test_the_base_alone_needs_no_adapter(stack: Stack) -> None:
    done = bench(stack, "--adapters", "0", "--json")
    assert json.loads(done.stdout)["num_finished"] == 20


def test_too_few_adapters_and_too_long_requests_are_said_before_anything_is_sent(
    stack: Stack,
) -> None:
    done = bench(stack, "--adapters", "5000")
    assert done.returncode == 2 and "--prepare-from" in done.stderr
    done = bench(stack, "--adapters", "1", "--prepare-from", "/no/such/folder", "--json")
    assert json.loads(done.stderr)["error"]["violations"][0]["field"] == "--prepare-from"
    prepare = ("--prepare-from", str(ADAPTERS[0]))
    done = bench(stack, "--adapters", "1", "--lengths", "8-512,8-512", *prepare)
    assert done.returncode == 2 and "512 tokens" in done.stderr
    assert "such as 128,128" in done.stderr and "published" not in done.stderr
