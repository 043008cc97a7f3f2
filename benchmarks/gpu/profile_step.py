"""Where the time of a step goes on a GPU: one table of kernels for each case.

    python -m benchmarks.gpu.profile_step [--shape llama-3-8b] [--device cpu --tiny]

Each case profiles a few steps of one plan with `torch.profiler` and prints, for every kernel, the
calls in a step, the microseconds of a step and their share of the sum. A kernel that runs several
times in a layer gets one line for each of its positions in the layer. `span_ms` is the time from
the first kernel of a step to its last, `busy_ms` the part of it in which some kernel ran, and
`sum_ms` the sum over all kernels, which is above `busy_ms` where streams overlap. Without a GPU the
operators of the CPU stand in for kernels: this only shows that the script runs.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import common
from benchmarks.gpu.bench_runner import BenchRunner, parse, runner_parser, spread
from benchmarks.gpu.common import SHAPES
from benchmarks.gpu.results import Results
from benchmarks.llama import ALL_SEVEN, ATTENTION
from loraplex_services.worker.types.step_plan import StepPlan

WARM_UP_STEPS = 3
KERNEL_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_NAME_LEN = 72


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts computed whole and generations next to them, with their adapters spread evenly."""

    name: str
    num_generations: int
    num_adapters: int = 0
    rank: int = 16
    targets: tuple[str, ...] = ALL_SEVEN
    prompt_lens: tuple[int, ...] = ()
    query_tokens: int = 1
    """Tokens of each generation: more than 1 as speculation verifies them, in a step that a graph
    for prompts computes."""


CASES = (
    Case("decode 64, base", 64),
    Case("verify 64 x 4 tokens, base", 64, query_tokens=4),
    Case("decode 64, 64 adapters on qkvo", 64, 64, targets=ATTENTION),
    Case("decode 64, 64 adapters on all seven", 64, 64),
    Case("verify 64 x 4 tokens, 64 adapters on all seven", 64, 64, query_tokens=4),
    Case("decode 64, 4 adapters on all seven", 64, 4),
    Case("decode 1, base", 1),
    Case("decode 1, 1 adapter on all seven", 1, 1),
    Case("decode 256, base", 256),
    Case("decode 256, 64 adapters on all seven", 256, 64),
    Case("prefill 2048, base", 0, prompt_lens=(2048,)),
    Case("prefill 2048, 1 adapter on all seven", 0, 1, prompt_lens=(2048,)),
    Case("prefill 8 x 256, 8 adapters on all seven", 0, 8, prompt_lens=(256,) * 8),
    Case("mixed 64 + 256, base", 64, prompt_lens=(256,)),
    Case("mixed 64 + 256, 65 adapters on all seven", 64, 65, prompt_lens=(256,)),
)
TINY_CASES = (
    Case("decode 2, base", 2),
    Case("decode 2, 2 adapters", 2, 2, 8),
    Case("mixed 2 + 20, 3 adapters", 2, 3, 4, prompt_lens=(20,)),
    Case("verify 2 x 4 tokens", 2, 2, 4, query_tokens=4),
)


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One launch as the profiler saw it."""

    name: str
    begin_us: float
    end_us: float
    grid: str
    registers: int


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel of a step, or one of its positions in a layer."""

    kernel: str
    calls: float
    total_us: float
    share: float
    mean_us: float
    grid: str
    registers: int


def main() -> int:
    """Profile every case, print its table, write all of them; returns how many failed."""
    args = parse_args()
    shape = SHAPES[args.shape]
    cases = [
        case for case in (TINY_CASES if args.tiny else CASES) if re.search(args.cases, case.name)
    ]
    facts = {"shape": shape.name, "context": args.context}
    results = Results(f"profile_{shape.name}", args, unprinted=("kernels",), **facts)
    with tempfile.TemporaryDirectory() as scratch:
        bench = BenchRunner(shape, Path(scratch), args, max_num_tokens=2048)
        results.note(copy_bytes_per_s=common.copy_bytes_per_s(bench.device, is_tiny=args.tiny))
        for case in cases:
            with results.setting(case.name):
                results.add("cases", profile_case(bench, case, args))
    return results.end()


def profile_case(bench: BenchRunner, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """The table of one case, printed and returned. Raises DoesNotFit."""
    bench.clear()
    bench.load([case.rank] * case.num_adapters, case.targets)
    plan = plan_of(bench, case, args.context)
    for _ in range(WARM_UP_STEPS):
        bench.runner.launch(plan).result()
    wall_s = bench.step_s(plan, args.steps)
    steps = profiled_steps(lambda: bench.runner.launch(plan).result(), bench.device, args.steps)
    rows = kernel_rows(steps, bench.shape.num_layers)
    times = {"wall_ms": wall_s * 1e3, **timeline_ms(steps)}
    print(f"\n### {case.name}\n{', '.join(f'{k} {v:.3f}' for k, v in times.items())}\n")
    common.print_table([asdict(row) for row in rows[: args.rows]])
    print("", flush=True)
    return {"case": case.name, **times, "kernels": [asdict(row) for row in rows]}


def plan_of(bench: BenchRunner, case: Case, context: int) -> StepPlan:
    """Prompts, then generations, each with its part of the adapters."""
    num_prompts = len(case.prompt_lens)
    slots = spread(num_prompts + case.num_generations, case.num_adapters)
    prompts = bench.prefill_plan(case.prompt_lens, slots[:num_prompts])
    if case.query_tokens > 1:
        return bench.verify_plan(slots, context, case.query_tokens)
    generations = bench.decode_plan(slots[num_prompts:], context)
    return StepPlan(0, (*prompts.rows, *generations.rows))


def profiled_steps(
    step: Callable[[], object], device: torch.device, num_steps: int
) -> list[list[KernelEvent]]:
    """The kernels of each of `num_steps` steps, in the order in which they began."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    steps = []
    for _ in range(num_steps):
        with torch.profiler.profile(activities=activities) as profile:
            step()
            common.synchronize(device)
        steps.append(kernel_events(profile, device))
    return steps


def kernel_events(profile: torch.profiler.profile, device: torch.device) -> list[KernelEvent]:
    """Kernels, copies and fills of a profile, read from its trace, which names their grids."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    categories = KERNEL_CATEGORIES if device.type == "cuda" else ("cpu_op",)
    events = [_event(entry) for entry in trace if entry.get("cat") in categories]
    return sorted(events, key=lambda event: event.begin_us)


def _event(entry: dict[str, Any]) -> KernelEvent:
    arguments = entry.get("args", {})
    grid = "x".join(str(size) for size in arguments.get("grid", ()))
    registers = int(arguments.get("registers per thread", 0))
    begin_us = float(entry["ts"])
    return KernelEvent(
        short_name(entry["name"]), begin_us, begin_us + float(entry["dur"]), grid, registers
    )


def short_name(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    name = re.sub(r"^void ", "", name)
    inner = re.search(r"at::native::(\w+)<.*?at::native::(?:\(anonymous namespace\)::)?(\w+)", name)
    if inner:
        return f"{inner[1]}: {inner[2]}"[:MAX_NAME_LEN]
    return re.sub(r"[<(].*", "", name)[:MAX_NAME_LEN]


def kernel_rows(steps: Sequence[Sequence[KernelEvent]], num_layers: int) -> list[KernelRow]:
    """Means over the steps, the longest total first."""
    groups: dict[str, list[KernelEvent]] = defaultdict(list)
    for events in steps:
        for label, event in labelled(events, num_layers):
            groups[label].append(event)
    total_us = sum(event.end_us - event.begin_us for events in groups.values() for event in events)
    rows = []
    for label, events in groups.items():
        spent_us = sum(event.end_us - event.begin_us for event in events)
        rows.append(
            KernelRow(
                kernel=label,
                calls=len(events) / len(steps),
                total_us=spent_us / len(steps),
                share=spent_us / total_us,
                mean_us=spent_us / len(events),
                grid=events[0].grid,
                registers=events[0].registers,
            )
        )
    return sorted(rows, key=lambda row: -row.total_us)


def labelled(events: Iterable[KernelEvent], num_layers: int) -> Iterable[tuple[str, KernelEvent]]:
    """Each event with its kernel's name and, where a layer runs the kernel several times, its
    position among them: `expand 2/4` is the second of four in every layer."""
    by_name: dict[str, list[KernelEvent]] = defaultdict(list)
    for event in events:
        by_name[event.name].append(event)
    for name, launches in by_name.items():
        in_layer, rest = divmod(len(launches), num_layers)
        for i, event in enumerate(launches):
            has_positions = in_layer > 1 and rest == 0
            yield f"{name} {i % in_layer + 1}/{in_layer}" if has_positions else name, event


def timeline_ms(steps: Sequence[Sequence[KernelEvent]]) -> dict[str, float]:
    """Milliseconds of a step from its first kernel to its last, with some kernel running, and
    summed over kernels: means over the steps."""
    span_us = busy_us = sum_us = 0.0
    for events in steps:
        last_us = events[0].begin_us
        for event in events:
            busy_us += max(0.0, event.end_us - max(event.begin_us, last_us))
            last_us = max(last_us, event.end_us)
            sum_us += event.end_us - event.begin_us
        span_us += last_us - events[0].begin_us
    names = ("span_ms", "busy_ms", "sum_ms")
    return {
        name: us / len(steps) / 1e3
        for name, us in zip(names, (span_us, busy_us, sum_us), strict=True)
    }


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = runner_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--steps", type=int, default=5, help="profiled steps of each case (5)")
    parser.add_argument("--rows", type=int, default=24, help="lines of each printed table (24)")
    parser.add_argument("--cases", default="", help="pattern that the names of cases contain")
    return parse(parser, context=32, steps=2, arena_bytes=8 << 20)


if __name__ == "__main__":
    raise SystemExit(main())
