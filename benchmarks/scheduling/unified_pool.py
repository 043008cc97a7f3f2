"""Simulated: one pool for KV cache and adapters, compared with fixed splits, drifting load.

    python -m benchmarks run scheduling.unified_pool [--arena 1.5GiB] [--shares 5,10,20,30,50]

Phases alternate between many adapters with short answers and one adapter with long answers. The
scheduler, the adapter cache and the prefix cache are the worker's own, in virtual time, at the
roofline costs of `slora_worker` (7B in float16, 24 GB GPU; not a measurement). A fixed split
gives adapters that share of the blocks, and the KV cache the rest. S-LoRA's own runs without
unified memory gave the KV cache of a 24 GB GPU 9,000 tokens instead of 14,000, so adapters had 36%
(on 80 GB GPUs: 35,000 instead of 65,000, 46%). Its released scheduler also takes the adapters of
the batch off the cache's tokens although they lie elsewhere (`ReqQueue._can_add_new_req`): "as
released". Prints requests that had their first token within 6 s, per second of the trace, and the
pool over the best of the shares and over S-LoRA's split, as means over seeds.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import msgspec

from benchmarks.machine import options_of, write_results
from benchmarks.scheduling.slora_worker import BLOCK_BYTES, fleet
from loraplex.cli.output import print_table
from loraplex.units import parse_bytes
from loraplex.workload import TracedRequest, UniformLengths, Workload, generate, ranks_of, summarize
from loraplex_services.simulate import worker as simulated_worker
from loraplex_services.simulate.simulation import Simulation
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.adapter_limits import AdapterLimits
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.engine.adapter_loads import AdapterLoads
from loraplex_services.worker.engine.engine import MAX_ADAPTER_SHARE, MAX_PINNED_SHARE, Engine
from loraplex_services.worker.engine.output_processor import OutputProcessor
from loraplex_services.worker.scheduling.admission import peak_kv_blocks
from loraplex_services.worker.scheduling.scheduler import Scheduler
from loraplex_services.worker.types.messages import EngineConfig
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.runner_protocol import Runner

PHASE_S, NUM_PHASES = 20.0, 4
MANY = Workload(400, 40.0, PHASE_S, lengths=UniformLengths((8, 32), (4, 16)))
FEW = Workload(1, 2.0, PHASE_S, lengths=UniformLengths((256, 512), (64, 256)))
"""Both more than the memory of either split can serve."""


def drifting(seed: int) -> list[TracedRequest]:
    """Phases in turn, each with a seed of its own."""
    trace = []
    for phase in range(NUM_PHASES):
        workload = dataclasses.replace((MANY, FEW)[phase % 2], seed=NUM_PHASES * seed + phase)
        trace += [
            dataclasses.replace(request, arrival_s=request.arrival_s + phase * PHASE_S)
            for request in generate(workload)
        ]
    return sorted(trace, key=lambda request: request.arrival_s)


@dataclass(frozen=True, slots=True)
class Split:
    """A part of the blocks for adapters, the rest for the KV cache."""

    name: str
    share: float
    """The share of the blocks that adapters have."""
    counts_twice: bool = False
    """Whether adapters in use also count as blocks of the cache when requests are admitted."""


SLORA_SPLITS = (
    Split("S-LoRA's split", 0.36),
    Split("S-LoRA's, as released", 0.36, counts_twice=True),
)


def splits_of(percents: str) -> list[Split]:
    """The splits of a list with commas, then S-LoRA's two."""
    shares = [int(text) / 100 for text in percents.split(",")]
    return [*(Split(f"{share:.0%} for adapters", share) for share in shares), *SLORA_SPLITS]


class SplitScheduler(Scheduler):
    """Admits requests by the KV cache's own share. The adapter cache decides which adapters fit."""

    adapter_blocks = 0
    counts_twice = False

    def _has_room(self, request: Request) -> bool:
        held = self._cache.held_blocks + self._cache.new_blocks(request.adapters.digests)
        peak = peak_kv_blocks((*self._running, request), self._layout)
        fits = peak + held * self.counts_twice <= self._arena.num_blocks
        return not self._running or (fits and held <= self.adapter_blocks)


class SplitEngine(Engine):
    """An engine whose adapters have an arena of their own."""

    def __init__(
        self, runner: Runner, config: EngineConfig, clock: Callable[[], float], *, split: Split
    ) -> None:
        total = runner.arena_blocks
        adapter_blocks = max(1, int(split.share * total))
        runner.arena_blocks = total - adapter_blocks
        super().__init__(runner, config, clock)
        arena, old = Arena(adapter_blocks, self._arena.pages_per_block), self.scheduler
        arena._free = list(range(total - 1, total - adapter_blocks - 1, -1))  # behind KV's
        self.cache = AdapterCache(
            arena,
            Reclaimer(arena),
            AdapterLimits(
                config.max_resident,
                max_adapter_blocks=int(total * MAX_ADAPTER_SHARE),
                max_pinned_blocks=int(total * MAX_PINNED_SHARE),
            ),
        )
        kv_reclaimer = Reclaimer(self._arena)
        self.scheduler = SplitScheduler(
            old._limits, old._layout, self._arena, self.cache, self._prefixes, kv_reclaimer
        )
        self.scheduler.adapter_blocks = adapter_blocks
        self.scheduler.counts_twice = split.counts_twice
        self._loads = AdapterLoads(runner, self.cache, self.scheduler.times)
        self._outputs = OutputProcessor(self.scheduler, self._grammars, self._info.eos_token_ids)


def engine_kind(split: Split | None) -> Callable[..., Engine]:
    """Makes an engine; None = one pool."""
    return Engine if split is None else partial(SplitEngine, split=split)


def measure(split: Split | None, arena_bytes: int, mix: list[int], seed: int) -> tuple[float, int]:
    """Requests in time per second of the trace, and copies; `split` None = one pool."""
    base = fleet(first_token_s=6.0)
    engine = msgspec.structs.replace(base.engine, arena_bytes=arena_bytes)
    with mock.patch.object(simulated_worker, "Engine", engine_kind(split)):
        ranks = ranks_of(mix, MANY.num_adapters)
        simulation = Simulation(dataclasses.replace(base, engine=engine), ranks)
        trace = drifting(seed)
        summary = summarize(simulation.run(trace))
    attained_per_s = summary.attainment * len(trace) / (PHASE_S * NUM_PHASES)
    return attained_per_s, simulation.tally.loads


def over_splits(figures: list[float]) -> dict[str, float]:
    """The first figure relative to the best split and to S-LoRA's two, which come last."""
    pool, *shares, slora, released = figures
    return {
        "over_best": pool / max(shares),
        "over_slora": pool / slora,
        "over_slora_as_released": pool / released,
    }


def rounded(ratios: dict[str, float]) -> str:
    """The ratios as one line of text."""
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())


def main() -> None:
    """Print the table and write the results."""
    parser = options_of(__doc__)
    parser.add_argument("--arena", type=parse_bytes, default=3 << 29)
    parser.add_argument("--shares", default="5,10,20,30,50")
    parser.add_argument("--ranks", default="64", help="dealt to the adapters (64)")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    splits = splits_of(args.shares)
    mix = [int(text) for text in args.ranks.split(",")]
    runs: list[dict[str, Any]] = []
    for split in (None, *splits):
        pairs = [measure(split, args.arena, mix, seed) for seed in range(args.seeds)]
        per_s, loads = (statistics.fmean(column) for column in zip(*pairs, strict=True))
        name = split.name if split else "one pool"
        runs.append({"memory": name, "attained_per_s": per_s, "loads": loads})
    rows = [[r["memory"], f"{r['attained_per_s']:.2f}", f"{r['loads']:.0f}"] for r in runs]
    print_table(["MEMORY", "IN TIME /S", "LOADS"], rows)
    ratios = over_splits([run["attained_per_s"] for run in runs])
    print(f"{args.arena // BLOCK_BYTES} blocks; one pool over the others: {rounded(ratios)}")
    name = f"unified_pool_{args.ranks.replace(',', '_')}_{args.arena // BLOCK_BYTES}"
    write_results(name, {"simulated": True, "runs": runs, **ratios}, args)


if __name__ == "__main__":
    main()
