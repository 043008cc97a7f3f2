"""`registry certify` against two gateways: here the same one, with the same adapter and another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.stack import DEMO, REPO, Stack, clean_environment


def test_a_version_is_certified_tagged_shown_and_refused(stack: Stack, tmp_path: Path) -> None:
    both = ("--gateway", stack.grpc, "--reference", stack.grpc)
    options = ("--max-kl", "1e-6", "--tag", "certified", "--json")
    printed = json.loads(stack.run_registry("certify", "upper:v1", *both, *options).stdout)
    assert (printed["name"], printed["version"]) == ("upper", 1)
    assert printed["certificate"]["max_kl"] < 1e-6
    found = json.loads(stack.run_registry("show", "upper:certified", "--json").stdout)
    [certificate] = found["certificates"]
    assert found["digest"] == printed["digest"]
    assert (found["version"], certificate["top1_agreement"]) == (1, 1.0)
    assert certificate["max_kl"] < 1e-6
    assert certificate["num_tokens"] > 100

    (tmp_path / "probe").write_text("one short text")
    other = ("--reference-model", "reverse:v1", "--max-kl", "0.01", "--tag", "refused")
    other += ("--probe", str(tmp_path / "probe"))
    done = stack.run_registry("certify", "upper:v1", *both, *other, check=False)
    assert done.returncode == 3
    assert "mean_kl = " in done.stderr
    assert "default/upper:v1 diverges more from reverse:v1 at" in done.stderr
    assert "than --max-kl 0.01 allows" in done.stderr
    shown = stack.run_registry("show", "upper:v1").stdout
    assert "against reverse:v1 at" in shown
    assert "refused" not in shown
    stack.run_registry("tag", "upper", "certified", "--delete")


def test_versions_are_certified_as_they_are_published(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("one short text")
    stack.publish(DEMO / "adapters" / "upper", name="followed", latest=False)
    rule = ("--probe", str(tmp_path / "probe"), "--max-kl", "1e-6", "--tag", "certified")
    with following(stack, stack.grpc, *rule) as outcomes:
        first = next(line for line in outcomes if line["name"] == "followed")
        assert (first["version"], first["error"]) == (1, None)
        assert first["certificate"]["top1_agreement"] == 1.0
        stack.publish(DEMO / "adapters" / "reverse", name="followed", latest=False)
        second = next(line for line in outcomes if line["name"] == "followed")
        assert second["version"] == 2
    found = json.loads(stack.run_registry("show", "followed:certified", "--json").stdout)
    assert (found["version"], len(found["certificates"])) == (2, 1)


@contextmanager
def following(stack: Stack, reference: str, *flags: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What `registry certify --follow` prints."""
    command = [sys.executable, "-m", "loraplex.cli.registry", "certify", "--follow", "--json"]
    command += ["--registry", stack.registry, "--gateway", stack.grpc, "--reference", reference]
    with subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, text=True, env=clean_environment(), cwd=REPO
    ) as process:
        assert process.stdout is not None
        try:
            yield map(json.loads, process.stdout)
        finally:
            process.terminate()
