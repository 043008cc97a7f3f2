"""Writes docs/parity-families.md: multimodal bases, gpt-oss, families of the transformers library.

Usage: python -m tests.worker.parity.write_families [BASE...]

Results are kept in a file of the temporary folder; with names only those bases are measured anew.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import peft
import torch
import transformers

from benchmarks.machine import cpu_facts
from tests.worker.parity import suite
from tests.worker.parity.bases import BASES, LIBRARY_BASES
from tests.worker.parity.near_tie import Verdict

OUT = Path(__file__).parents[3] / "docs" / "parity-families.md"
KEPT = Path(tempfile.gettempdir()) / "loraplex-parity-families.json"
NUM_NEW_TOKENS = 64
NUM_BATCHES = 3
CHUNK_TOKENS = 19
NATIVE = [name for name, (_, changes) in BASES.items() if "text_config" in changes]
NATIVE += ["gemma4", "gemma4-moe", "gemma4-all", "gpt-oss", "qwen3.5", "qwen3-next"]
THROUGH_LIBRARY = [*LIBRARY_BASES, "qwen3", "gpt-oss", "gemma4-all"]
INTRODUCTION = """# Parity of multimodal bases, gpt-oss and families of the transformers library

The bases are tiny and random, written by the classes of transformers in the layout in which they
are published. The adapters are random, as PEFT writes them. {num_batches} continuous batches of
each base mix all of its adapters in float32. Requests arrive staggered, prompts are computed in
chunks of {chunk_tokens} tokens, and each request generates {num_new_tokens} greedy tokens. Every
token is compared with transformers and PEFT, which run one request at a time.

The rule for near ties is that of [parity](parity.md). Logprobs differ by less than 1e-4, except at
sensitive positions. There, the reference's own logprobs move as far when its weights change by a
rounding error of float32. Weights of routers change by 1e-5, because the choice of experts may also
be a near tie.

Bases with the model code "library" run with `--model-impl transformers` and up to thirteen kinds of
adapters. The others run all kinds that PEFT has for them.
`python -m tests.worker.parity.write_families`
wrote this page on {today}, with
torch {torch}, transformers {transformers} and peft {peft} on {chip}.
"""


def measure(name: str, through_library: bool) -> dict[str, object]:
    """All adapters of a base in several batches."""
    with tempfile.TemporaryDirectory() as folder:
        make = suite.set_library_stage if through_library else suite.set_stage
        return measured(make(name, Path(folder)), NUM_BATCHES)


def measured(stage: suite.Stage, num_batches: int) -> dict[str, object]:
    """All adapters of a stage in several batches."""
    total, worst = Verdict(), 0.0
    for seed in range(num_batches):
        jobs = suite.make_jobs(stage, seed, NUM_NEW_TOKENS, stagger=True)
        stage.driver.run([job for _, job in jobs], chunk=CHUNK_TOKENS)
        for feature, verdict, error in suite.judge(stage, jobs):
            assert error < suite.MAX_LOGPROB_ERROR, (stage.base.name, feature, error)
            total.add(verdict)
            worst = max(worst, error)
    return {
        "adapters": len(stage.slots),
        "positions": total.num_positions,
        "ties": total.num_ties,
        "sensitive": total.num_sensitive,
        "error": f"{worst:.0e}",
    }


def rows(known: dict[str, dict[str, object]]) -> Iterator[str]:
    """The table."""
    titles = (
        "base",
        "model code",
        "adapters",
        "positions",
        "near ties",
        "sensitive",
        "largest logprob error",
    )
    yield "| " + " | ".join(titles) + " |"
    yield "|---|---|---|---|---|---|---|"
    for key in keys():
        name, _, code = key.partition(" ")
        row = known[key]
        measured = (row[c] for c in ("adapters", "positions", "ties", "sensitive", "error"))
        cells = (name, code, *measured)
        yield "| " + " | ".join(map(str, cells)) + " |"


def keys() -> list[str]:
    """Base and model code of each row."""
    return [f"{name} native" for name in NATIVE] + [f"{name} library" for name in THROUGH_LIBRARY]


def provenance(device: str = "cpu") -> dict[str, str]:
    """The date, the versions and the chip of this run, which the introductions name."""
    return {
        "today": str(date.today()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "chip": torch.cuda.get_device_name() if device == "cuda" else cpu_facts()["cpu"],
    }


def main() -> None:
    """Measure and, when nothing is missing, write the document."""
    parser = argparse.ArgumentParser(description="Write the table of families.")
    parser.add_argument("bases", nargs="*", metavar="BASE", help="those to measure (all)")
    wanted = parser.parse_args().bases
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    known = json.loads(KEPT.read_text()) if wanted and KEPT.exists() else {}
    for key in keys():
        name, _, code = key.partition(" ")
        if not wanted or name in wanted:
            known[key] = measure(name, code == "library")
            KEPT.write_text(json.dumps(known))
            print(key, known[key], flush=True)
    if not set(keys()) <= set(known):
        return
    counts = ("positions", "ties", "sensitive")
    positions, ties, sensitive = (sum(int(str(known[k][c])) for k in keys()) for c in counts)
    text = INTRODUCTION.format(
        num_batches=NUM_BATCHES,
        chunk_tokens=CHUNK_TOKENS,
        num_new_tokens=NUM_NEW_TOKENS,
        **provenance(),
    )
    summary = (
        f"{positions} positions, {ties} near ties, {sensitive} sensitive, no other difference."
    )
    OUT.write_text("\n".join([text, summary, "", *rows(known), ""]))
    print(summary)


if __name__ == "__main__":
    main()
