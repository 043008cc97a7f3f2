"""`registry split --shadow` on a real stack: live requests decide whether a tag moves."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.workload.adapter_variants import write_variant
from tests.e2e.stack import ADAPTERS, Stack

NAME = "shadowed"
SERVED, DAMAGED, SAME = 1, 2, 3
SCORER = (
    "import json, sys\n"
    "for line in sys.stdin:\n"
    "    print(float(json.loads(line)['version'] == '{loved}'), flush=True)\n"
)


@pytest.fixture(scope="module", autouse=True)
def versions(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Three versions: the first is served as `prod`, the second is damaged, and the third decodes
    as the first."""
    root = tmp_path_factory.mktemp("shadowed")
    # Content that no other test of this stack has: some of them need adapters that are new to it.
    folders = [root / str(number) for number in (101, 102, 103)]
    for folder in folders:
        write_variant(ADAPTERS[0], int(folder.name), folder)
    tensors = load_file(folders[1] / "adapter_model.safetensors")
    noise = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        tensors[name] = tensor + tensor.std() * torch.randn(tensor.shape, generator=noise)
    save_file(tensors, folders[1] / "adapter_model.safetensors", metadata={"format": "pt"})
    stack.publish(*folders, name=NAME)
    stack.run_registry("tag", f"{NAME}:v1", "prod")


@contextmanager
def traffic(stack: Stack) -> Iterator[None]:
    """Requests for the tag, one after another."""
    is_over = threading.Event()

    def send() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            stack.complete(f"{NAME}:prod", f"word {number}=", max_tokens=6, temperature=0)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        is_over.set()
        sender.join()


def shadow(stack: Stack, version: int, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ("split", NAME, "prod", f"v{SERVED}=1", f"v{version}=9", "--shadow", "--json")
    with traffic(stack):
        return stack.run_registry(*command, "--gateway", stack.grpc, *flags, check=False)


def prod(stack: Stack) -> int:
    shown = json.loads(stack.run_registry("show", f"{NAME}:prod", "--json").stdout)
    return int(shown["version"])


def last_move(stack: Stack) -> dict[str, Any]:
    entries = map(json.loads, stack.run_registry("audit", "--json").stdout.splitlines())
    return next(e for e in entries if e["subject"] == f"default/{NAME}:prod")


def test_a_damaged_version_is_rejected_and_the_tag_stays(stack: Stack) -> None:
    done = shadow(stack, DAMAGED)
    assert done.returncode == 3, done.stderr
    [violation] = json.loads(done.stderr)["error"]["violations"]
    assert violation["field"] == "mean" and float(violation["value"]) < -0.01
    assert violation["description"].startswith(
        f"default/{NAME}:v2 is rejected, compared with v1: its log-probability per token minus "
    )
    assert violation["description"].endswith("must be above -0.01")
    assert prod(stack) == SERVED
    assert "v2 is rejected" in last_move(stack)["details"]["reason"]


def test_a_scorer_decides_by_its_own_scores(stack: Stack, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(SCORER.replace("{loved}", "served"))
    done = shadow(stack, SAME, "--scorer", f"{sys.executable} {scorer}")
    assert done.returncode == 3, done.stderr
    assert prod(stack) == SERVED
    scorer.write_text("print('good')")
    done = shadow(stack, SAME, "--scorer", f"{sys.executable} {scorer}")
    assert done.returncode == 2 and "number from 0 to 1" in done.stderr


def test_too_few_requests_decide_nothing(stack: Stack) -> None:
    done = shadow(stack, SAME, "--max-pairs", "3")
    assert done.returncode == 1, done.stderr
    error = json.loads(done.stderr)["error"]
    assert (error["code"], error["reason"]) == ("FAILED_PRECONDITION", "UNDECIDED")
    assert "undecided" in error["message"] and prod(stack) == SERVED


def test_only_what_the_tag_points_at_can_be_compared(stack: Stack) -> None:
    done = stack.run_registry(
        "split", NAME, "prod", f"v{SAME}=1", f"v{DAMAGED}=1", "--shadow", check=False
    )
    assert done.returncode == 4 and "must point at v3" in done.stderr


def test_flags_of_the_comparison_need_shadow_and_a_value_that_fits(stack: Stack) -> None:
    words = ("split", NAME, "prod", f"v{SERVED}=1", f"v{SAME}=1")
    for flags, told in (
        (("--margin", "0.2"), "is used only with --shadow"),
        (("--shadow", "--scorer", "'open"), "No closing quotation"),
        (("--shadow", "--scorer", ""), "must be a command"),
        (("--shadow", "--margin", "nan"), "above 0 and below 1"),
        (("--shadow", "--max-pairs", "0"), "must be at least 1"),
    ):
        done = stack.run_registry(*words, *flags, check=False)
        assert done.returncode == 2 and told in done.stderr, done.stderr
    assert prod(stack) == SERVED


def test_an_equal_version_takes_the_tag(stack: Stack) -> None:
    done = shadow(stack, SAME, "--margin", "0.2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == SAME == prod(stack)
    assert "v3 is accepted" in last_move(stack)["details"]["reason"]
