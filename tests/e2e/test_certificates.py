"""`registry certify` against two gateways: here the same one, with the same adapter and another."""

from __future__ import annotations

import json

from tests.e2e.stack import Stack


def test_a_version_is_certified_tagged_shown_and_refused(stack: Stack) -> None:
    both = ("--gateway", stack.grpc, "--reference", stack.grpc)
    stack.run_registry("certify", "upper:v1", *both, "--max-kl", "1e-6", "--tag", "certified")
    found = json.loads(stack.run_registry("show", "upper:certified", "--json").stdout)
    [certificate] = found["certificates"]
    assert (found["version"], certificate["top1_agreement"]) == (1, 1.0)
    assert certificate["max_kl"] < 1e-6
    assert certificate["num_tokens"] > 100

    other = ("--reference-model", "reverse:v1", "--max-kl", "0.01", "--tag", "refused")
    done = stack.run_registry("certify", "upper:v1", *both, *other, check=False)
    assert done.returncode == 3
    assert "default/upper:v1 = KL" in done.stderr
    assert "is above --max-kl 0.01" in done.stderr
    shown = stack.run_registry("show", "upper:v1").stdout
    assert "against reverse:v1 at" in shown
    assert "refused" not in shown
    stack.run_registry("tag", "upper", "certified", "--delete")
