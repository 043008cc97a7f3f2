"""The drill of docs/operate/backup.md: a restored backup serves what the first stack did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import ADAPTERS, Stack, clean_environment, start

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


@pytest.mark.long
def test_a_stack_on_a_restored_backup_serves_what_the_first_one_did(
    stack: Stack, tmp_path: Path
) -> None:
    stack.run_registry("tag", f"{ADAPTERS[0].name}:v1", "prod")
    copy(f"file://{stack.state_dir}/objects", f"file://{tmp_path}/backup")
    copy(f"file://{tmp_path}/backup", f"file://{tmp_path}/restored")
    environment = {"LORAPLEX_OBJECTS": f"file://{tmp_path}/restored"}
    restored = start(tmp_path / "state", *("--dtype", "float32"), environment=environment)
    try:
        assert listed(restored) == listed(stack) != []
        assert answers(restored) == answers(stack)
    finally:
        assert restored.stop() == 0
