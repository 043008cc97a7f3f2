"""What people type every day: help, versions, typos, lists, deletions, going back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.client.settings import unknown_variables
from loraplex_services.common.settings.variables import known_names
from tests.cli.conftest import DEMO

MASK = DEMO / "adapters" / "mask"
REGISTRY, LORAPLEX = "loraplex.cli.registry", "loraplex.cli.loraplex"


def _run(module: str, *args: str, **environ: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("module", [REGISTRY, LORAPLEX])
def test_the_bare_command_prints_its_help_and_version_its_version(module: str) -> None:
    code, out, _ = _run(module)
    assert code == 0 and "exit codes:" in out
    code, out, _ = _run(module, "--version")
    assert code == 0 and re.fullmatch(r"(registry|loraplex) \d+\.\d+\.\d+\S*\n", out)


def test_a_misspelt_variable_is_named_with_the_right_one(tmp_path: Path) -> None:
    where = {"LORAPLEX_REGISTRY_ADRESS": "x", "LORAPLEX_REGISTRY_ADDRESS": "127.0.0.1:1"}
    _, _, errors = _run(REGISTRY, "list", **where)
    assert (
        "LORAPLEX_REGISTRY_ADRESS is ignored; the nearest known one is LORAPLEX_REGISTRY_ADDRESS"
        in errors
    )
    _, _, errors = _run(
        REGISTRY, "list", LORAPLEX_HTTP_CERT="x", LORAPLEX_REGISTRY_ADDRESS="127.0.0.1:1"
    )
    assert "unknown variable" not in errors


def test_connection_flags_may_precede_the_command(registry: Any) -> None:
    code, out, errors = _run(
        REGISTRY,
        "--registry",
        registry.variables["LORAPLEX_REGISTRY_ADDRESS"],
        "--json",
        "base",
        "list",
    )
    assert code == 0 and out.startswith("{"), errors


@pytest.fixture(scope="module")
def published(registry: Any) -> Any:
    """Names that begin with day-."""
    for name, label in (("day-b", "x"), ("day-a", "y"), ("day-c", "x")):
        registry.json("upload", str(MASK), "--name", name, "--label", f"kind={label}")
    return registry


def test_lists_are_sorted_and_cut(published: Any) -> None:
    names = [each["name"] for each in published.lines("list", "--prefix", "day-")]
    assert names == ["day-a", "day-b", "day-c"]
    newest = published.lines("list", "--prefix", "day-", "--sort", "created", "--limit", "2")
    assert [each["name"] for each in newest] == ["day-c", "day-a"]
    first = published.lines("list", "--prefix", "day-", "--limit", "1")
    assert [each["name"] for each in first] == ["day-a"]


def test_the_list_of_a_name_that_nobody_has_is_an_error_and_an_empty_selection_is_not(
    published: Any,
) -> None:
    code, error = published.error("list", "day-d")
    assert (code, error["code"]) == (7, "NOT_FOUND")
    assert "there is no adapter default/day-d" in error["message"]
    for nothing in (("--prefix", "day-d"), ("day-a", "--label", "kind=z"), ("--tenant", "all")):
        assert published.lines("list", *nothing) == []
        code, _, errors = _run(REGISTRY, "list", *nothing, **published.variables)
        assert (code, errors) == (0, "nothing found\n")


def test_usage_is_that_of_a_name_and_not_of_a_version(published: Any) -> None:
    code, _, errors = _run(LORAPLEX, "usage", "--adapter", "day-a:v1", **published.variables)
    assert code == 2
    assert "takes a name without a tag, version or digest; try 'day-a'" in errors
    code, _, errors = _run(LORAPLEX, "usage", "--adapter", "day-a", **published.variables)
    assert (code, errors) == (0, "nothing found\n")


def test_an_error_says_what_is_missing_and_what_exists(published: Any) -> None:
    def message(ref: str) -> str:
        code, error = published.error("show", ref)
        assert code == 7
        return str(error["message"])

    assert "there is no adapter default/day-aa; did you mean default/day-a?" in message("day-aa")
    assert "has no tag prod (tags: latest; versions: v1)" in message("day-a:prod")
    assert "has no version v7 (versions: v1)" in message("day-a:v7")
    assert "no version of default/day-a has this digest" in message(f"day-a@sha256:{'0' * 64}")


def test_a_name_is_shown_as_it_was_first_published(registry: Any) -> None:
    registry.json("upload", str(MASK), "--name", "Night-Shift", "--tag", "prod")
    calls = (
        ("tag", "night-shift:v1", "prod"),
        ("tag", "NIGHT-SHIFT:v1", "canary"),
        ("split", "night-shift", "canary", "v1=1"),
        ("tag", "night-shift", "canary", "--delete"),
        ("rollback", "night-shift", "canary"),
    )
    assert [registry.json(*call)["name"] for call in calls] == ["Night-Shift"] * len(calls)
    assert [m["name"] for m in registry.lines("history", "NIGHT-shift", "prod")] == ["Night-Shift"]
    tags = registry.json("show", "night-shift")["adapter_tags"]
    assert {tag["name"] for tag in tags} == {"Night-Shift"}
    registry.json("share", "night-shift", "--public")
    registry.json("describe", "night-shift", "Answers at night.")
    code, error = registry.error("delete", "night-shift:v1")
    assert "Night-Shift:v1 has the tags canary, prod; move them first" in error["message"]
    code, error = registry.error("tag", "night-shift:v1", "prod", "--expect", "none")
    assert code == 4 and error["message"].startswith("default/Night-Shift:prod is v1 sha256:")
    code, error = registry.error("split", "night-shift", "prod", "v1=1", "v9=1")
    assert code == 7 and "'default/Night-Shift:v9'" in error["message"]
    code, error = registry.error("history", "night-shift", "absent")
    assert code == 7 and "default/Night-Shift has no tag absent (tags: " in error["message"]
    log = [json.loads(entry) for entry in registry("audit", "--json").stdout.splitlines()]
    subjects = {e["subject"] for e in log if "night-shift" in e["subject"].lower()}
    assert subjects == {
        "default/Night-Shift",
        "default/Night-Shift:canary",
        "default/Night-Shift:prod",
        "default/Night-Shift:v1",
    }
    for ref, why in (
        (
            "night-shift:v7",
            "no adapter 'default/Night-Shift:v7': default/Night-Shift has no version",
        ),
        ("night-shift:x", "no adapter 'default/Night-Shift:x': default/Night-Shift has no tag x"),
        ("night-shif", "there is no adapter default/night-shif; did you mean default/Night-Shift?"),
    ):
        code, error = registry.error("show", ref)
        assert code == 7 and why in error["message"]


def test_adapters_are_deleted_by_pattern_and_label(published: Any) -> None:
    selected = ("delete", "day-*", "--all", "--label", "kind=x")
    shown = published.lines(*selected, "--dry-run")
    assert [each["name"] for each in shown] == ["day-b", "day-c"]
    deleted = published.lines(*selected)
    assert [each["name"] for each in deleted] == ["day-b", "day-c"]
    assert [each["name"] for each in published.lines("list", "--prefix", "day-")] == ["day-a"]
    code, error = published.error("delete", "day-x*", "--all")
    assert code == 7 and "no adapter matches" in error["message"]
    code, _ = published.error("delete", "day-a:v1", "--label", "kind=x")
    assert code == 2


def test_no_variable_of_the_servers_looks_like_a_misspelt_one_of_the_tools() -> None:
    assert unknown_variables(dict.fromkeys(known_names(), "x")) == []
