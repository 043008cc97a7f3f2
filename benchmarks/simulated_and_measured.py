"""What the simulator says of a trace, beside what a stack did with it.

    python -m benchmarks.simulated_and_measured --work-dir DIR [--rates 20,40,80]

`loraplex up` serves the demo's base and a hundred copies of its adapters, and writes a step trace.
`loraplex bench trace` first sends a trace of one seed, on which the simulator's costs are fitted;
then, for each rate, traces of other seeds, which `loraplex simulate` predicts from those costs
alone. The costs know the steps, the copies and one constant, the time that requests spent outside
the engine during the fitting. Printed: simulated over measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import write_results
from demo.stack import Stack, running_stack
from loraplex.cli.output import print_table

DEMO = Path(__file__).parents[1] / "demo"
FIGURES = (
    ("requests/s", ("requests_per_s",)),
    ("output tokens/s", ("output_tokens_per_s",)),
    ("first token p50", ("first_token", "p50_s")),
    ("per token p50", ("per_token", "p50_s")),
    ("whole request p50", ("latency", "p50_s")),
    ("whole request p90", ("latency", "p90_s")),
)


def loraplex(*arguments: str) -> Any:
    """What a command prints with `--json`."""
    command = [sys.executable, "-m", "loraplex.cli.loraplex", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def workload(args: argparse.Namespace, rate: float, seed: int) -> list[str]:
    """Flags that `bench trace` and `simulate` share."""
    return [
        *("--adapters", str(args.adapters), "--alpha", str(args.alpha), "--rate", str(rate)),
        *("--duration", str(args.seconds), "--lengths", args.lengths, "--seed", str(seed)),
    ]


def figure(summary: dict[str, Any], keys: tuple[str, ...]) -> float:
    """One number of a summary."""
    for key in keys:
        summary = summary[key]
    assert isinstance(summary, float), keys
    return summary


def measure(args: argparse.Namespace, stack: Stack, steps: Path, part: Path) -> list[Any]:
    """The fitting run, whose steps go to `part`, then one run for each rate."""
    send = ("bench", "trace", "--gateway", stack.grpc)
    publish = ("--registry", stack.registry, "--prepare-from", str(DEMO / "adapters"))
    warm_up = [*workload(args, 5.0, 0), "--duration", "2"]
    loraplex(*send, *publish, *warm_up)  # later runs find the adapters published
    begin = steps.stat().st_size
    runs = [loraplex(*send, *workload(args, args.fit_rate, seed=1))]
    lines = steps.read_text()
    part.write_text(lines[: lines.index("\n") + 1] + lines[begin:])
    for index, rate in enumerate(args.rates):
        runs.append(loraplex(*send, *workload(args, rate, seed=2 + index)))
    return runs


def main() -> None:
    """Measure, simulate, print, write `results/<machine>/simulated_and_measured.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for state and step trace")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--lengths", default="8-128,8-64")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each trace (20)")
    parser.add_argument("--fit-rate", type=float, default=40.0)
    parser.add_argument(
        "--rates", type=lambda text: [float(part) for part in text.split(",")], default=[20.0, 80.0]
    )
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    steps, part = args.work_dir / "steps.jsonl", args.work_dir / "fitted.jsonl"
    steps.unlink(missing_ok=True)
    settings = {"LORAPLEX_STEP_TRACE": str(steps), "LORAPLEX_KV_MEMORY": "64MiB"}
    with running_stack(DEMO / "base", "loraplex-demo", args.work_dir / "state", settings) as stack:
        fitted, *measured = measure(args, stack, steps, part)
    fit = ["--fit", str(part), "--outside", str(fitted["outside"]["p50_s"])]
    rows, runs = [], []
    for index, (rate, seen) in enumerate(zip(args.rates, measured, strict=True)):
        said = loraplex("simulate", *fit, *workload(args, rate, 2 + index), "--ranks", "8,16,32,4")
        pairs = {name: (figure(said, keys), figure(seen, keys)) for name, keys in FIGURES}
        ratios = {name: one / other for name, (one, other) in pairs.items()}
        rows.append([f"{rate:g}", *(f"{ratio:.2f}" for ratio in ratios.values())])
        runs.append({"rate": rate, "ratios": ratios, "simulated": said, "measured": seen})
    print(f"fitted at {args.fit_rate:g} requests/s; simulated over measured:")
    print_table(["RATE", *(name.upper() for name, _ in FIGURES)], rows)
    results = {"fit_rate": args.fit_rate, "fitted": fitted, "runs": runs}
    print(f"wrote {write_results('simulated_and_measured', results)}")


if __name__ == "__main__":
    main()
