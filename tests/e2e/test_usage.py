"""Who used what, from the gateway's requests to the command, and the log line of each request."""

from __future__ import annotations

import csv
import io
import json
import time
from typing import Any

import pytest

from tests.e2e.stack import BASE_ID, Stack

WITHIN_S = 60.0


def _usage(stack: Stack, *args: str) -> list[dict[str, Any]]:
    done = stack.run_loraplex("usage", "--registry", stack.registry, *args)
    assert done.returncode == 0, done.stderr
    if "--csv" in args:
        return list(csv.DictReader(io.StringIO(done.stdout)))
    return [json.loads(line) for line in done.stdout.splitlines()]


def _of(entries: list[dict[str, Any]], model: str) -> dict[str, int]:
    found = [entry for entry in entries if entry["model"] == model]
    names = ("requests", "errors", "prompt_tokens", "cached_tokens", "generated_tokens")
    return {name: sum(int(entry[name]) for entry in found) for name in names}


@pytest.fixture
def before(stack: Stack) -> list[dict[str, Any]]:
    """Usage by other tests, once it has been reported."""
    last: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline_s:
        time.sleep(6.0)
        found = _usage(stack, "--json")
        if found == last:
            return found
        last = found
    raise AssertionError("the usage never settles")


def test_requests_are_counted_by_adapter_and_shown_by_command_and_endpoint(
    stack: Stack, before: list[dict[str, Any]]
) -> None:
    answers = [stack.complete("upper", "hello=") for _ in range(3)]
    answers.append(stack.complete(BASE_ID, "abc 12="))
    expected = {
        model: {
            "requests": len(used),
            "prompt_tokens": sum(each["prompt_tokens"] for each in used),
            "generated_tokens": sum(each["completion_tokens"] for each in used),
            "cached_tokens": sum(each["prompt_tokens_details"]["cached_tokens"] for each in used),
            "errors": 0,
        }
        for model, used in (
            ("default/upper", [answer["usage"] for answer in answers[:3]]),
            (BASE_ID, [answers[3]["usage"]]),
        )
    }

    def grown(entries: list[dict[str, Any]], model: str) -> dict[str, int]:
        old = _of(before, model)
        return {name: number - old[name] for name, number in _of(entries, model).items()}

    deadline_s = time.monotonic() + WITHIN_S
    while grown(entries := _usage(stack, "--json"), BASE_ID)["requests"] < 1:
        assert time.monotonic() < deadline_s, entries
        time.sleep(0.5)
    for model, counts in expected.items():
        assert grown(entries, model) == counts
    only = _usage(stack, "--adapter", "default/upper", "--csv")
    assert {entry["model"] for entry in only} == {"default/upper"}
    status, text = stack.get("/v1/usage?adapter=default/upper")
    assert status == 200 and _of(json.loads(text)["data"], "default/upper") == _of(
        only, "default/upper"
    )
    status, text = stack.get("/v1/usage?tenant=other")
    assert status == 400 and json.loads(text)["error"]["param"] == "tenant"


def test_each_request_has_one_log_line_without_its_text(stack: Stack) -> None:
    secret = "my secret words 123="
    stack.complete("upper", secret)
    status, _ = stack.post("/v1/completions", {"model": "nobody", "prompt": secret})
    assert status == 404
    log = stack.state_dir.with_name(f"{stack.state_dir.name}.log").read_text()
    lines = [json.loads(line) for line in log.splitlines() if '"event": "request"' in line]
    done, refused = lines[-2:]
    assert (done["outcome"], done["tenant"], done["model"]) == ("ok", "default", "default/upper:v1")
    assert done["generated_tokens"] > 0 and done["duration_s"] > 0 and done["request_id"]
    assert refused["outcome"] == "adapter_not_found"
    assert "secret" not in log
