"""What `loraplex status`, `top` and `fetch` show of a running stack."""

from __future__ import annotations

import json

from tests.e2e.stack import ADAPTERS, BASE_ID, Stack


def test_top_refreshes_as_often_as_the_interval_says(stack: Stack) -> None:
    stack.complete(ADAPTERS[0].name, "a=")
    digest = json.loads(stack.run_registry("show", ADAPTERS[0].name, "--json").stdout)["digest"]
    done = stack.run_loraplex("top", "--count", "2", "--interval", "100ms", "--json")
    assert done.returncode == 0, done.stderr
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 2
    for look in looks:
        assert look["ready"] is True
        assert look["base_ids"] == [BASE_ID]
        [worker] = look["workers"]
        # By digest: other names of the same content may be shown in place of this one.
        assert digest in {adapter["digest"] for adapter in worker["adapters"]}


def test_top_does_not_ask_the_gateway_all_the_time(stack: Stack) -> None:
    done = stack.run_loraplex("top", "--count", "1", "--interval", "0")
    assert done.returncode == 2 and "--interval" in done.stderr


def test_top_without_a_terminal_does_not_clear_it(stack: Stack) -> None:
    done = stack.run_loraplex("top", "--count", "1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "WORKER" in done.stdout


def test_fetch_shows_a_name_as_it_was_first_published(stack: Stack) -> None:
    done = stack.run_registry("upload", str(ADAPTERS[1]), "--name", "Fetched-First", "--json")
    assert done.returncode == 0, done.stderr
    try:
        fetched = stack.run_loraplex("fetch", "fetched-first", "--json")
        assert fetched.returncode == 0, fetched.stderr
        assert json.loads(fetched.stdout)["name"] == "Fetched-First"
    finally:
        stack.run_registry("delete", "fetched-first", "--all")


def test_fetch_tells_what_is_loaded_and_where(stack: Stack) -> None:
    name = ADAPTERS[1].name
    done = stack.run_loraplex("fetch", name, "--json")
    assert done.returncode == 0, done.stderr
    fetched = json.loads(done.stdout)
    shown = json.loads(stack.run_registry("show", name, "--json").stdout)
    assert [fetched[key] for key in ("name", "version", "digest")] == [name, 1, shown["digest"]]
    assert fetched["worker_ids"] == ["worker-0"]
    assert stack.run_loraplex("fetch", "nobody").returncode == 7
    assert stack.run_loraplex("fetch", BASE_ID).returncode == 2
