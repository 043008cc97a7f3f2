"""Writes docs/parity.md: every base x every LoRA feature, measured by the parity suite.

Usage: python -m tests.worker.parity.write_table [--device cuda] [--out FILE] [BASE...]

With names only those bases are measured. Results are kept in a file of the temporary folder, one
for each device, and the document is written when all bases are in it: on a GPU
docs/parity-cuda.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from tests.worker.parity import heads, ropes, suite, write_families
from tests.worker.parity.adapters import FEATURES
from tests.worker.parity.bases import BASES, TinyBase
from tests.worker.parity.driving import Driver
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.own_eos import outputs_of_both
from tests.worker.parity.runners import DEVICES, parity_runner, use_device

DOCUMENTS = {"cpu": "parity.md", "cuda": "parity-cuda.md"}
"""In docs/, by device."""
TABLE = [name for name in BASES if name not in write_families.NATIVE]
"""Bases of this document; `write_families` writes about the others."""
NUM_NEW_TOKENS = 64
CHUNK_TOKENS = 19
INTRODUCTION = """# Parity with transformers and PEFT

For each family there is a tiny random base, with one random adapter for each feature, as PEFT
writes it. All adapters of a base decode in one continuous batch in float32. Requests arrive
staggered, prompts are computed in chunks of {chunk_tokens} tokens, and each request generates
{num_new_tokens} greedy tokens. Every token is compared with transformers and PEFT, which run one
request at a time. `python -m tests.worker.parity.write_table{option}` wrote this page on {today},
with torch {torch}, transformers {transformers} and peft {peft} on {chip}.

A cell holds the largest error of a logprob, which must stay below 1e-4. `+n` counts near ties, in
which the float64 gap of the two tokens is below 1e-5 standard deviations of the logits. `-` means
that PEFT has no such adapter for the base, or that it is refused by name. The last rows differ:

- `rope:` rows are adapters with a rotary embedding of their own (label `rope_scaling`). They are
  batched with each other and the base, and compared with a base whose config has that embedding.
- `own EOS` is `same` if outputs end as those of `generate` with the adapter's ids.
- `score:` rows are classification heads, with the largest error of a logit against
  `*ForSequenceClassification`.
- `vector:` rows hold the largest error of a value against the hidden states of `*Model`.

`tests/worker/parity/test_unusual.py` checks 200 other random bases of odd geometry, with
several features each (76,800 positions). 40 of them are of Qwen 3.5, Qwen 3 Next, Gemma 4, gpt-oss
and Ministral 3. They keep the bound as well, or are as near to PEFT in float64 as PEFT in float32
is. Where attention amplifies rounding, changing weights by one rounding error moves PEFT's own
logprobs by up to 1e-3, and its classification logits by up to 1e-4.

In bfloat16 (`tests/worker/parity/test_bfloat16.py`, twelve bases, 10,000 positions each), the mean
error against float32 is at most 1.1x that of transformers, and the 99th percentile at most 1.25x.
"""


def introduction(device: str) -> str:
    """The text above the table, with the versions and the chip of this run."""
    return INTRODUCTION.format(
        chunk_tokens=CHUNK_TOKENS,
        num_new_tokens=NUM_NEW_TOKENS,
        option=" --device cuda" * (device == "cuda"),
        **write_families.provenance(device),
    )


Row = dict[str, str]
"""Feature -> cell."""


class Count:
    """Positions and near ties of all that was measured."""

    def __init__(self) -> None:
        self.total = Verdict()

    def cell(self, results: list[tuple[Verdict, float]]) -> str:
        """Several results of one feature as text."""
        here = Verdict()
        for verdict, _ in results:
            here.add(verdict)
        self.total.add(here)
        ties = f" +{here.num_ties}" if here.num_ties else ""
        return _bounded("logprobs", max(error for _, error in results)) + ties


def measure(base_name: str, count: Count) -> Row:
    """All features of a base."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stage = suite.set_stage(base_name, root)
        jobs = suite.make_jobs(stage, 1, NUM_NEW_TOKENS, stagger=True)
        stage.driver.run([job for _, job in jobs], chunk=CHUNK_TOKENS)
        generated = _grouped(suite.judge(stage, jobs), "{}")
        row = {name: count.cell(found) for name, found in generated.items()}
        return (
            row
            | _ropes(stage.base, root, count)
            | _own_eos(stage.base, root)
            | _heads(stage.base, root)
        )


def _grouped(
    found: Iterable[tuple[str | None, Verdict, float]], label: str
) -> dict[str, list[tuple[Verdict, float]]]:
    groups: dict[str, list[tuple[Verdict, float]]] = {}
    for name, verdict, error in found:
        groups.setdefault(label.format(name or "base"), []).append((verdict, error))
    return groups


def _ropes(base: TinyBase, root: Path, count: Count) -> Row:
    stage = ropes.set_rope_stage(base, list(ropes.SCALINGS), root / "ropes")
    jobs = ropes.make_jobs(stage, NUM_NEW_TOKENS, stagger=True)
    stage.driver.run([job for _, job in jobs], chunk=CHUNK_TOKENS)
    found = _grouped(ropes.judge(stage, jobs), "rope: {}")
    return {name: count.cell(results) for name, results in found.items() if name in ROPE_ROWS}


def _own_eos(base: TinyBase, root: Path) -> Row:
    ours, theirs = outputs_of_both(base, root / "eos", NUM_NEW_TOKENS)
    assert ours == theirs, base.name
    return {"own EOS": "same"}


def _heads(base: TinyBase, root: Path) -> Row:
    driver = Driver(parity_runner(base.folder, arena_bytes=32 << 20))
    stage = heads.set_head_stage(base, driver, root / "heads")
    jobs = heads.score_jobs(stage)
    driver.run([job for _, job in jobs], chunk=CHUNK_TOKENS)
    errors = {f"score: {name}": e for name, e in heads.score_errors(stage, jobs).items()}
    vectors = heads.vector_errors(base, driver, root / "vectors", CHUNK_TOKENS)
    errors |= {f"vector: {pooling.name.lower()}": e for pooling, e in vectors.items()}
    return {name: _bounded(name, error) for name, error in errors.items()}


def _bounded(name: str, error: float) -> str:
    assert error < suite.MAX_LOGPROB_ERROR, f"{name}: {error:.1e}"
    return f"{error:.0e}"


ROPE_ROWS = [f"rope: {name}" for name in ropes.SCALINGS]
ROWS = [
    "base", *FEATURES, *ROPE_ROWS, "own EOS", *(f"score: {name}" for name in heads.FEATURES),
    "vector: last", "vector: mean",
]  # fmt: skip


def table(results: dict[str, Row]) -> str:
    """Features down, bases across."""
    lines = [
        "| feature | " + " | ".join(results) + " |",
        "|---|" + "---|" * len(results),
    ]
    for feature in ROWS:
        cells = [found.get(feature, "-") for found in results.values()]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and, when nothing is missing, write the document."""
    args = parse_args()
    use_device(args.device)
    kept = Path(tempfile.gettempdir()) / f"loraplex-parity-{args.device}.json"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    if not args.bases:
        kept.unlink(missing_ok=True)
    for name in args.bases or TABLE:
        count = Count()
        row = measure(name, count)
        known = json.loads(kept.read_text()) if kept.exists() else {}
        known[name] = {"row": row, "counts": [count.total.num_positions, count.total.num_ties]}
        kept.write_text(json.dumps(known))
        print(name, *known[name]["counts"], flush=True)
    if not set(TABLE) <= set(known):
        return
    positions, ties = (sum(known[name]["counts"][i] for name in TABLE) for i in (0, 1))
    summary = f"{positions} positions, {ties} near ties, no other difference."
    results = {name: known[name]["row"] for name in TABLE}
    args.out.write_text(f"{introduction(args.device)}\n{summary}\n\n{table(results)}\n")
    print(summary)


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description="Write the parity table.")
    parser.add_argument("bases", nargs="*", metavar="BASE", help="those to measure (all)")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--out", type=Path, help="the document to write")
    args = parser.parse_args()
    args.out = args.out or Path(__file__).parents[3] / "docs" / DOCUMENTS[args.device]
    return args


if __name__ == "__main__":
    main()
