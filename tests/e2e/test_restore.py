"""The drill of docs/operate/backup.md: a restored backup serves what the first stack did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import ADAPTERS, Stack, clean_environment, start
from tests.s3_servers import objects_url_of

PROMPT = "hello 12="


def copy(source: str, target: str) -> None:
    """Run the command as the page says."""
    command = [sys.executable, "-m", "loraplex_services.registry.maintenance.backup"]
    done = subprocess.run(
        [*command, source, target], capture_output=True, text=True, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr


def listed(stack: Stack) -> list[str]:
    """Every version with its tags."""
    return stack.run_registry("list", "--all", "--json").stdout.splitlines()


def answers(stack: Stack) -> list[str]:
    """What every adapter says."""
    return [stack.complete(each.name, PROMPT)["choices"][0]["text"] for each in ADAPTERS]


def started(folder: Path, objects_url: str) -> Stack:
    """A stack whose objects are in a store."""
    environment = {"LORAPLEX_OBJECTS": objects_url}
    return start(folder / "state", "--dtype", "float32", environment=environment)


@pytest.mark.long
def test_a_stack_on_a_restored_backup_serves_what_the_first_one_did(
    stack: Stack, tmp_path: Path
) -> None:
    backup, target = f"file://{tmp_path}/backup", f"file://{tmp_path}/restored"
    stack.run_registry("tag", f"{ADAPTERS[0].name}:v1", "prod")
    copy(f"file://{stack.state_dir}/objects", backup)
    copy(backup, target)
    restored = started(tmp_path, target)
    try:
        assert listed(restored) == listed(stack) != []
        assert answers(restored) == answers(stack)
    finally:
        assert restored.stop() == 0


@pytest.mark.s3
@pytest.mark.timeout(600)
def test_a_bucket_is_backed_up_to_a_folder_and_restored_into_another_bucket(
    tmp_path: Path,
) -> None:
    bucket, target = (objects_url_of("s3", tmp_path) for _ in range(2))
    (tmp_path / "first").mkdir()
    first = started(tmp_path / "first", bucket)
    try:
        first.publish(*ADAPTERS)
        first.run_registry("tag", f"{ADAPTERS[0].name}:v1", "prod")
        copy(bucket, f"file://{tmp_path}/backup")
        expected = listed(first), answers(first)
    finally:
        assert first.stop() == 0
    copy(f"file://{tmp_path}/backup", target)
    restored = started(tmp_path, target)
    try:
        assert (listed(restored), answers(restored)) == expected
    finally:
        assert restored.stop() == 0
