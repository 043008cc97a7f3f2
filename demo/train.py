"""Regenerates everything that the demo serves. Run `python -m demo.train` in the root of the
repository.

Pre-trains the base into demo/base, trains every adapter into demo/adapters, scores the saved
files on held-out prompts and writes the table of demo/README.md.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from demo.evaluate import Score, folder_bytes, score_all, table, write_table
from demo.finetune import finetune, save_adapter
from demo.pretrain import pretrain, save_base
from demo.recipes import RECIPES

HERE = Path(__file__).parent
BASE = HERE / "base"
ADAPTERS = HERE / "adapters"
NUM_SCORED = 500
SCORED_SEED = 1
ADAPTER_FLOOR = 0.98
BASE_CEILING = 0.10


def report(line: str) -> None:
    """Show progress at once, also when the output is a file."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def misses(scores: Sequence[Score]) -> list[str]:
    """The scores that miss their bounds, in words; empty if there are none."""
    lines = [
        f"{s.skill_name}: adapter {s.adapter_share:.1%}, promised >= {ADAPTER_FLOOR:.0%}"
        for s in scores
        if s.adapter_share < ADAPTER_FLOOR
    ]
    lines += [
        f"{s.skill_name}: bare base {s.base_share:.1%}, promised < {BASE_CEILING:.0%}"
        for s in scores
        if s.base_share >= BASE_CEILING
    ]
    return lines


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument(
        "--adapters",
        nargs="*",
        choices=list(RECIPES),
        metavar="NAME",
        help="train only these, on the existing base (without names: only score)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, score, write the table; 1 if a saved file falls short of what it promises."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.adapters is None:
        save_base(pretrain(args.seed, report), BASE)
    for name in RECIPES if args.adapters is None else args.adapters:
        save_adapter(finetune(name, RECIPES[name], BASE, args.seed, report), ADAPTERS / name)
    scores = score_all(BASE, ADAPTERS, NUM_SCORED, SCORED_SEED)
    text = table(scores, NUM_SCORED)
    write_table(HERE / "README.md", text)
    report(f"all weights: {(folder_bytes(BASE) + folder_bytes(ADAPTERS)) / 1e6:.1f} MB\n{text}")
    for line in misses(scores):
        report(line)
    return 1 if misses(scores) else 0


if __name__ == "__main__":
    sys.exit(main())
