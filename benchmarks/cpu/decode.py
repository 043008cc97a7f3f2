"""Decoding on a CPU: the engine in process, compared with transformers and PEFT.

    python -m benchmarks run cpu.decode --work-dir DIR [--model 135m] [--repetitions 3] [--no-peer]

Random weights; adapters of ranks 8, 16, 32 and 64 on every linear; 64 to 128 prompt tokens, fresh
in every repetition; greedy; all requests at once. The sides alternate. Prints ratios and writes
`results/<machine>/cpu_decode.json`; `--join` adds repetitions to those in the file. Compare numbers
within one run only. On a machine that other processes use, set OMP_NUM_THREADS=1: OpenMP, which the
peer uses, waits for threads that the system has preempted, so one thread per side is fairer.

The first requests decode while prompts of the last ones are computed in steps of 0.2 s, as in a
worker. If prompts take so long that no step decodes all requests, the step is NaN. Then use more
`--new-tokens`, or `--max-step-s 0`, which removes the limit.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.limits import measure_limits
from benchmarks.cpu.sides import OurEngine, PeftMixed, Run, median
from benchmarks.cpu_model import (
    SHAPES,
    Shape,
    dtype_of,
    engine_options,
    make_adapter,
    make_base,
    make_prompts,
    peer_dtype_of,
    rank_of,
)
from benchmarks.machine import read_results, write_results
from loraplex_services.worker.native.isa import choose_isa
from loraplex_services.worker.scheduling.limits import MAX_STEP_S

NUM_THREADS = torch.get_num_threads()
CASES = "8x0,32x0,8x1,32x1,32x8,8x8,32x32"
"""Requests x distinct adapters. The peer runs where both numbers are equal, and on the base."""

Results = dict[str, dict[str, list[Run]]]
"""Runs by case and by side."""


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    shape = SHAPES[args.model]
    base = make_base(shape, args.work_dir)
    folders = [make_adapter(shape, args.work_dir, i) for i in range(args.adapters)]
    limits = measure_limits(args.cpu_isa)
    results: Results = {}
    if args.join:
        results, limits = joined(args, limits)
    arena_bytes = args.arena_bytes or bytes_for(folders)
    limit = {"max_step_s": args.max_step_s}
    ours = OurEngine(base, args.dtype, args.cpu_isa, arena_bytes, **limit)
    ours.touch()
    loads = {"loraplex": ours.load(folders)}
    sides: dict[str, Any] = {"loraplex": ours}
    if args.peer:
        sides["peft"] = peer = PeftMixed(base, args.peer_dtype, NUM_THREADS)
    cases = [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]
    measure(results, sides, [case for case in cases if case[1] == 0], shape, args)
    alone = [case for case in cases if case[1] not in (0, case[0])]
    measure(results, {"loraplex": ours}, alone, shape, args)
    if args.peer:
        loads["peft"] = peer.load(folders)
    measure(results, sides, [case for case in cases if case[1] == case[0]], shape, args)
    report(shape, args, limits, results, loads)


def parse_args() -> Namespace:
    """Options."""
    parser = engine_options(__doc__)
    parser.add_argument("--cases", default=CASES, help="requests x adapters, with each base case")
    parser.add_argument("--max-step-s", type=float, default=MAX_STEP_S, help="0 = no limit")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--dtype", default=dtype_of())
    parser.add_argument("--cpu-isa", default="auto")
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--peer-dtype", default=peer_dtype_of())
    parser.add_argument("--arena-bytes", type=int, help="by default, all adapters fit")
    parser.add_argument("--name", default="cpu_decode", help="of the results file")
    parser.add_argument("--join", action="store_true", help="add to the runs of the results file")
    return parser.parse_args()


def bytes_for(folders: list[Path]) -> int:
    """Size of an arena with room for these adapters and the KV cache of all cases."""
    files = (folder / "adapter_model.safetensors" for folder in folders)
    adapter_bytes = sum(file.stat().st_size for file in files)
    return max(2_000_000_000, 1_000_000_000 + adapter_bytes * 9 // 8)


def joined(args: Namespace, limits: dict[str, float]) -> tuple[Results, dict[str, float]]:
    """The runs of the results file, and the machine's best limits in that file and now.

    Raises:
        SystemExit: naming an option whose value was different when the file was made.
    """
    found = read_results(args.name)
    for key in ("model", "new_tokens", "dtype", "cpu_isa", "peer_dtype"):
        if found["options"][key] != getattr(args, key):
            raise SystemExit(f"--join: {key} was {found['options'][key]} before")
    runs = {
        case: {name: [Run(**run) for run in runs] for name, runs in sides.items()}
        for case, sides in found["runs"].items()
    }
    return runs, {key: max(value, found["limits"][key]) for key, value in limits.items()}


def measure(
    results: Results,
    sides: dict[str, Any],
    cases: Sequence[tuple[int, ...]],
    shape: Shape,
    args: Namespace,
) -> None:
    """Run every case on every side alternately. Mutates: results."""
    for count, num_adapters in cases:
        runs = results.setdefault(f"{count}x{num_adapters}", {name: [] for name in sides})
        num_before = len(runs["loraplex"])
        for side in sides.values():
            # As long as what is measured, so that no repetition is the first to touch its memory.
            prompts = make_prompts(count, shape.vocab_size, seed=-1)
            side.run(prompts, num_adapters, args.new_tokens)
        for repetition in range(num_before, num_before + args.repetitions):
            prompts = make_prompts(count, shape.vocab_size, seed=1000 * count + repetition)
            for name, side in sides.items():
                run = side.run(prompts, num_adapters, args.new_tokens)
                runs[name].append(run)
                rate = count * args.new_tokens / run.wall_s
                print(
                    f"{count}x{num_adapters} {name}: {rate:.1f} tok/s, step {run.step_s * 1e3:.1f}"
                    f" ms ({run.step_cpu_s * 1e3:.1f} of processor)",
                    flush=True,
                )


def report(
    shape: Shape,
    args: Namespace,
    limits: dict[str, float],
    results: Results,
    loads: dict[str, list[float]],
) -> None:
    """Print the ratios and write everything."""
    rows = []
    for case, sides in results.items():
        ours = sides["loraplex"]
        row: dict[str, Any] = {"case": case}
        row["tokens_per_s"] = case_rate(case, args.new_tokens, ours)
        base = results[f"{case.split('x')[0]}x0"]["loraplex"]
        row["step_over_base"] = median(ours, "step_s") / median(base, "step_s")
        row["step_cpu_over_base"] = median(ours, "step_cpu_s") / median(base, "step_cpu_s")
        row["step_over_floor"] = median(ours, "step_s") / floor_s(shape, case, limits)
        if "peft" in sides:
            peer = sides["peft"]
            row["speed_over_peft"] = median(peer, "wall_s") / median(ours, "wall_s")
            row["speed_over_peft_cpu"] = median(peer, "cpu_s") / median(ours, "cpu_s")
            row["step_over_peft_cpu"] = median(peer, "step_cpu_s") / median(ours, "step_cpu_s")
            row["first_token_over_peft"] = median(ours, "first_token_s") / median(
                peer, "first_token_s"
            )
        rows.append({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |")
    load_ms = {name: round(statistics.median(s) * 1e3, 1) for name, s in loads.items()}
    print(f"adapter load, median ms: {load_ms}; limits: {limits}")
    args.repetitions = max(len(sides["loraplex"]) for sides in results.values())
    facts = {"isa": choose_isa(args.cpu_isa), "num_threads": NUM_THREADS, "limits": limits}
    write_results(args.name, {**facts, "table": rows, "load_ms": load_ms, "runs": results}, args)


def case_rate(case: str, num_tokens: int, runs: Sequence[Run]) -> float:
    """New tokens a second, prefill included."""
    return int(case.split("x")[0]) * num_tokens / median(runs, "wall_s")


def floor_s(shape: Shape, case: str, limits: dict[str, float]) -> float:
    """The longer of moving a step's bytes (weights in bfloat16) and doing its arithmetic."""
    count, num_adapters = map(int, case.split("x"))
    ranks = [rank_of(adapter) for adapter in range(num_adapters)]
    num_bytes = 2 * (shape.num_weights + sum(map(shape.num_adapter_weights, ranks)))
    row_ranks = [rank_of(row % num_adapters) for row in range(count)] if num_adapters else []
    num_flops = 2 * (
        count * shape.num_weights + sum(shape.num_adapter_weights(rank) for rank in row_ranks)
    )
    return max(num_bytes / limits["read_bytes_per_s"], num_flops / limits["flops_per_s"])


if __name__ == "__main__":
    main()
