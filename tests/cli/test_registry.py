"""The registry command against a real registry: results, JSON forms and exit codes."""

from __future__ import annotations

import filecmp
import functools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

DEMO_BASE = Path(__file__).parents[2] / "demo" / "base"


@pytest.fixture
def broken(adapter: Path, tmp_path: Path) -> Path:
    """An adapter whose config says another rank than its tensors have."""
    folder = tmp_path / "broken"
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "r": 7}))
    return folder


def _other(registry: Any) -> str:
    return str(Path(__file__).parents[2] / "demo" / "adapters" / "upper")


def test_uploads_lists_shows_and_pulls_the_same_bytes(
    registry: Any, adapter: Path, tmp_path: Path
) -> None:
    first = registry.json("upload", str(adapter), "--name", "pulled", "--label", "team=blue")
    assert (first["name"], first["version"], first["created"]) == ("pulled", 1, True)
    assert first["digest"].startswith("sha256:")
    again = registry.json("upload", str(adapter), "--name", "pulled")
    assert (again["version"], again["digest"]) == (1, first["digest"])
    assert again["created"] is False

    lines = registry("list", "--label", "team=blue", "--json").stdout.splitlines()
    assert [json.loads(line)["digest"] for line in lines] == [first["digest"]]
    shown = registry.json("show", "pulled")
    assert (shown["name"], shown["version"], shown["digest"]) == ("pulled", 1, first["digest"])

    target = tmp_path / "new" / "folder"
    assert registry.json("pull", "pulled:v1", str(target))["digest"] == first["digest"]
    names = [path.name for path in adapter.iterdir()]
    assert filecmp.cmpfiles(adapter, target, names, shallow=False) == (names, [], [])


def test_pull_into_a_used_folder_needs_force(registry: Any, adapter: Path, tmp_path: Path) -> None:
    registry.json("upload", str(adapter), "--name", "forced")
    (tmp_path / "mine.txt").write_text("keep me")
    code, error = registry.error("pull", "forced", str(tmp_path))
    assert (code, error["code"]) == (4, "ALREADY_EXISTS")
    assert "--force" in error["message"]
    registry.json("pull", "forced", str(tmp_path), "--force")
    assert (tmp_path / "mine.txt").read_text() == "keep me"
    assert (tmp_path / "adapter_config.json").exists()


def test_tag_moves_by_compare_and_set_and_rolls_back(registry: Any, adapter: Path) -> None:
    one = registry.json("upload", str(adapter), "--name", "tagged")
    two = registry.json("upload", _other(registry), "--name", "tagged")
    moved = registry.json("tag", "tagged:v1", "prod", "--expect", "none")
    assert (moved["name"], moved["version"], moved["digest"]) == ("tagged", 1, one["digest"])
    code, error = registry.error("tag", "tagged:v2", "prod", "--expect", "none")
    assert (code, error["code"]) == (4, "ABORTED")
    assert registry.json("tag", "tagged:v2", "prod", "--expect", one["digest"])["version"] == 2
    assert registry.json("rollback", "tagged", "prod")["version"] == 1
    assert registry.json("show", "tagged:latest")["digest"] == two["digest"]
    split = registry.json("split", "tagged", "prod", "v1=90", "v2=10")
    assert [target["weight"] for target in split["targets"]] == [90, 10]


def test_history_tells_every_move_of_a_tag_newest_first(registry: Any, adapter: Path) -> None:
    one = registry.json("upload", str(adapter), "--name", "moved")
    two = registry.json("upload", _other(registry), "--name", "moved", "--tag", "prod")
    registry.json("split", "moved", "prod", "v1=90", "v2=10")
    registry.json("tag", "moved", "prod", "--delete")
    moves = [
        json.loads(line)
        for line in registry("history", "moved", "prod", "--json").stdout.splitlines()
    ]
    assert [move["generation"] for move in moves] == [3, 2, 1]
    assert [(move["name"], move["version"]) for move in moves] == [
        ("moved", None),
        ("moved", 1),
        ("moved", 2),
    ]
    assert [move["digest"] for move in moves] == [None, one["digest"], two["digest"]]
    lines = registry("history", "default/moved", "prod").stdout.splitlines()
    assert [re.split("  +", line)[1:] for line in lines] == [
        ["BY", "TO"],
        ["-", "(deleted)"],
        ["-", "v1:90 v2:10"],
        ["-", "v2"],
    ]
    assert registry.error("history", "moved", "staging")[0] == 7


def test_staged_move_that_no_gateway_takes_up_exits_6_and_leaves_the_tag(
    registry: Any, adapter: Path
) -> None:
    registry.json("upload", str(adapter), "--name", "staged", "--tag", "prod")
    registry.json("upload", _other(registry), "--name", "staged", "--no-latest")
    staged = registry.json("tag", "staged:v2", "prod", "--when-loaded")
    assert (staged["version"], staged["targets"][0]["version"]) == (2, 1)
    assert "pending v2" in registry("show", "staged:v1").stdout
    code, error = registry.error("tag", "staged:v2", "prod", "--when-loaded=1s", "--wait")
    assert (code, error["reason"]) == (6, "NOT_LOADED")
    shown = registry.json("show", "staged:v1")
    prod = next(tag for tag in shown["adapter_tags"] if tag["tag"] == "prod")
    assert [target["version"] for target in prod["targets"]] == [1]
    assert "not loaded in time" in prod["pending_reason"]
    assert "not loaded in time" in registry("show", "staged:v1").stdout


def test_delete_refuses_a_tagged_version_and_never_the_number_again(
    registry: Any, adapter: Path
) -> None:
    registry.json("upload", str(adapter), "--name", "gone", "--tag", "prod")
    code, error = registry.error("delete", "gone:v1")
    assert (code, error["code"]) == (4, "FAILED_PRECONDITION")
    assert registry.json("delete", "gone:v1", "--force")["version"] == 1
    assert registry.error("show", "gone:v1")[0] == 7
    assert registry.json("upload", _other(registry), "--name", "gone")["version"] == 2


def test_diff_names_what_changed(registry: Any, adapter: Path) -> None:
    registry.json("upload", str(adapter), "--name", "changed")
    registry.json("upload", _other(registry), "--name", "changed")
    found = registry.json("diff", "changed:v1", "changed:v2")
    fields = {change["field"] for change in found["changes"]}
    assert {"digest", "files.adapter_model.safetensors"} <= fields
    assert "config.peft_type" not in fields


def test_refused_adapter_exits_3_naming_the_field_and_publishes_nothing(
    registry: Any, broken: Path
) -> None:
    code, error = registry.error("upload", str(broken), "--name", "refused")
    assert (code, error["code"]) == (3, "INVALID_ARGUMENT")
    assert all(v["field"] and v["description"] for v in error["violations"])
    assert registry.error("show", "refused")[0] == 7


def test_dry_run_checks_without_publishing(registry: Any, adapter: Path, broken: Path) -> None:
    checked = registry.json("upload", str(adapter), "--name", "dry", "--dry-run")
    assert (checked["name"], checked["base_id"]) == ("dry", "loraplex-demo")
    assert registry.error("upload", str(broken), "--name", "dry", "--dry-run")[0] == 3
    assert registry.error("show", "dry")[0] == 7


def test_unknown_adapter_exits_7(registry: Any) -> None:
    code, error = registry.error("show", "nobody")
    assert (code, error["code"], error["reason"]) == (7, "NOT_FOUND", "ADAPTER_NOT_FOUND")


def test_misspelled_name_exits_2_with_the_corrected_spelling(registry: Any, adapter: Path) -> None:
    code, error = registry.error("upload", str(adapter), "--name", "My Adapter")
    assert code == 2
    assert "My-Adapter" in error["message"]


@pytest.mark.parametrize(
    "command",
    [
        ["list", "upper:v1"],
        ["describe", "upper:v1"],
        ["describe", "upper:v1", "Sorts words"],
        ["history", "upper:v1", "prod"],
        ["rollback", "upper:v1", "prod"],
        ["split", "upper:v1", "prod", "v1=1"],
        ["split", "upper:v1", "prod", "v1=1", "v2=1", "--shadow"],
        ["share", "upper:v1", "--public"],
        ["tag", "upper:v1", "prod", "--delete"],
    ],
)
def test_a_version_where_a_name_belongs_exits_2_with_the_name(
    registry: Any, command: list[str]
) -> None:
    code, error = registry.error(*command)
    assert code == 2
    assert error["message"].endswith("takes a name without a tag, version or digest; try 'upper'")


def test_watch_reports_an_upload_and_an_interrupt_exits_130(registry: Any, adapter: Path) -> None:
    registry.json("upload", str(adapter), "--name", "seen-before")
    command = registry.argv("watch", "--json", "--registry", _address(registry))
    # A runner in the background has interrupts ignored, which children would inherit.
    hears = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hears) as watch:
        assert watch.stdout is not None
        seen: list[dict[str, Any]] = []
        for line in watch.stdout:
            seen.append(json.loads(line))
            if seen[-1]["name"] == "seen-before":
                break
        registry.json("upload", str(adapter), "--name", "seen-live")
        for line in watch.stdout:
            live = json.loads(line)
            if live["name"] == "seen-live":
                break
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == 130
    assert seen[0]["kind"] == "snapshot"
    assert (live["kind"], live["version"]) == ("version", 1)
    assert live["digest"] == live["adapter"]["digest"] == seen[-1]["digest"]


def test_progress_bar_is_drawn_on_a_terminal_only(registry: Any, adapter: Path) -> None:
    arguments = ("upload", str(adapter), "--name", "drawn")
    assert "%" not in registry(*arguments).stderr
    parent, child = pty.openpty()
    command = registry.argv(*arguments, "--registry", _address(registry))
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=child, check=True, timeout=60)
    os.close(child)
    drawn = os.read(parent, 65536).decode()
    os.close(parent)
    assert "[####" in drawn and "100%" in drawn


def _address(registry: Any) -> str:
    address: str = registry.variables["LORAPLEX_REGISTRY_ADDRESS"]
    return address


def test_shares_an_adapter_and_takes_it_back(registry: Any, adapter: Path) -> None:
    registry.json("upload", str(adapter), "--name", "shared")
    shared = registry.json("share", "shared", "--with", "acme", "--with", "globex", "--pullable")
    assert (shared["visibility"], shared["pullable"]) == ("shared", True)
    assert shared["shared_with"] == ["acme", "globex"]
    assert registry.json("show", "shared")["visibility"] == "shared"
    assert registry.json("share", "shared", "--public")["visibility"] == "public"
    private = registry.json("share", "shared", "--private")
    assert (private["visibility"], private["shared_with"]) == ("private", [])
    assert not private["pullable"]


def test_describes_an_adapter_and_lists_it_by_its_labels(registry: Any, adapter: Path) -> None:
    registry.json("upload", str(adapter), "--name", "told", "--label", "run=7")
    said = registry.json("describe", "told", "Sorts words", "--label", "team=a", "-l", "on=call")
    assert said == {
        "name": "told",
        "version": None,
        "digest": None,
        "description": "Sorts words",
        "labels": {"on": "call", "team": "a"},
    }
    assert registry.json("describe", "told", "--remove-label", "on")["labels"] == {"team": "a"}
    assert registry.json("describe", "told") == said | {"labels": {"team": "a"}}
    shown = registry.json("show", "told")
    assert (shown["description"], shown["labels"]) == ("Sorts words", {"run": "7"})
    for label in ("team=a", "run=7"):
        assert registry.json("list", "--label", label)["name"] == "told"


def test_keys_are_made_listed_and_revoked(registry: Any) -> None:
    made = registry.json("keys", "create", "--scope", "publisher", "--ttl", "1d")
    assert made["token"].startswith(f"lpx_{made['key_id']}_")
    assert made["expires_unix_s"] == pytest.approx(made["created_unix_s"] + 86400, abs=1)
    lines = registry("keys", "list", "--json").stdout.splitlines()
    assert made["key_id"] in {json.loads(line)["key_id"] for line in lines}
    assert registry.json("keys", "revoke", made["key_id"])["revoked"] is True
    mistyped = ("keys", "create", "--tenant", "acne")
    assert "first key of tenant acne" in registry(*mistyped).stderr
    assert registry(*mistyped).stderr == ""


def test_tenants_bases_audit_and_upkeep(registry: Any, adapter: Path) -> None:
    registry.json("upload", str(adapter), "--name", "audited")
    limited = registry.json("tenants", "set", "acme", "--max-bytes", "5GiB")
    assert limited["max_bytes"] == 5 << 30
    assert "acme" in registry("tenants", "list").stdout
    base = registry.json("base", "list")
    assert (base["name"], base["digest"]) == ("loraplex-demo", base["fingerprint"])
    entries = [json.loads(line) for line in registry("audit", "--json").stdout.splitlines()]
    about = {entry["subject"]: (entry["name"], entry["version"]) for entry in entries}
    assert about["default/audited:v1"] == ("audited", 1) and about["acme"] == (None, None)
    everything = registry("audit", "--json", "--limit", "0").stdout.splitlines()
    assert len(everything) >= len(entries)
    assert registry("audit", "--limit", "1").stdout.split()[:4] == [
        "TIME",
        "BY",
        "ACTION",
        "SUBJECT",
    ]
    assert registry.json("gc", "--dry-run")["deleted_objects"] == 0
    assert registry.json("reindex")["bases"] == 1


def test_a_base_of_a_type_that_no_worker_serves_is_refused_by_name(
    registry: Any, tmp_path: Path
) -> None:
    copied = shutil.copytree(DEMO_BASE, tmp_path / "base")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    done = registry("base", "add", str(copied), "--id", "odd")
    assert done.returncode != 0
    assert "config.json:model_type" in done.stderr
    assert "nonesuch" in done.stderr
    assert "start a worker" in done.stderr
    assert registry.json("base", "list")["name"] == "loraplex-demo"


def test_tables_are_for_people(registry: Any, adapter: Path) -> None:
    registry.json("upload", str(adapter), "--name", "tabled", "--tag", "prod")
    header, *rows = registry("list", "--prefix", "tabled").stdout.splitlines()
    assert header.split()[:3] == ["NAME", "VERSION", "TAGS"]
    assert rows[0].split()[:3] == ["default/tabled", "v1", "latest,prod"]
    assert "tags\n" in registry("show", "tabled").stdout


def test_the_first_key_of_a_registry_that_answered_is_announced(registry: Any) -> None:
    done = registry("keys", "create", "--bootstrap")
    assert done.stdout.startswith("lpx_")
    assert "a registry answered and created this key for itself" in done.stderr
