"""Writes docs/parity.md: every base x every LoRA feature, measured by the parity suite.

Usage: python -m tests.worker.parity.write_table
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tests.worker.parity.adapters import FEATURES
from tests.worker.parity.bases import BASES
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.suite import judge, make_jobs, set_stage

DOCUMENT = Path(__file__).parents[3] / "docs" / "parity.md"
NUM_NEW_TOKENS = 64
CHUNK_TOKENS = 19
INTRODUCTION = f"""# Parity with transformers and PEFT

Tiny random bases of each family, one random adapter per feature as PEFT writes it, all in one
continuous batch: staggered arrivals, prompts in chunks of {CHUNK_TOKENS} tokens, float32,
{NUM_NEW_TOKENS} greedy tokens each. Every token is compared with transformers + peft run one
request at a time. A cell holds the largest logprob error; `+n` counts near ties (the float64 gap of
the two tokens is below 1e-5 standard deviations of the logits); `-` means PEFT has no such adapter
for the base, or it is refused by name. Written by `python -m tests.worker.parity.write_table`.
"""


def measure(base_name: str) -> dict[str, tuple[Verdict, float]]:
    """Per feature: verdict and largest logprob error."""
    results: dict[str, tuple[Verdict, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        stage = set_stage(base_name, Path(folder))
        jobs = make_jobs(stage, 1, NUM_NEW_TOKENS, stagger=True)
        stage.driver.run([job for _, job in jobs], chunk=CHUNK_TOKENS)
        for name, verdict, error in judge(stage, jobs):
            total, worst = results.setdefault(name or "base", (Verdict(), 0.0))
            total.add(verdict)
            results[name or "base"] = total, max(worst, error)
    return results


def cell(result: tuple[Verdict, float] | None) -> str:
    """One result as text."""
    if result is None:
        return "-"
    verdict, error = result
    ties = f" +{verdict.num_ties}" if verdict.num_ties else ""
    return f"{error:.0e}{ties}"


def table(results: dict[str, dict[str, tuple[Verdict, float]]]) -> str:
    """Features down, bases across."""
    lines = [
        "| feature | " + " | ".join(results) + " |",
        "|---|" + "---|" * len(results),
    ]
    for feature in ["base", *FEATURES]:
        cells = [cell(found.get(feature)) for found in results.values()]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure everything and write the document."""
    torch.set_num_threads(1)
    results = {name: measure(name) for name in BASES}
    verdicts = [verdict for found in results.values() for verdict, _ in found.values()]
    positions = sum(verdict.num_positions for verdict in verdicts)
    ties = sum(verdict.num_ties for verdict in verdicts)
    summary = f"{positions} positions, {ties} near ties, no other difference."
    DOCUMENT.write_text(f"{INTRODUCTION}\n{summary}\n\n{table(results)}\n")
    print(summary)


if __name__ == "__main__":
    main()
