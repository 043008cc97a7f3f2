"""What planning costs beside the step: `python -m benchmarks.plan_cost [--step-ms 50]`.

A full batch decodes while others wait, each with a deadline and one of many adapters. Times one
`hopeless` + `plan` + taking in the tokens, without a model, and prints its share of a step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path

from benchmarks.machine import write_results
from services.worker.adapters.cache import AdapterCache
from services.worker.adapters.residency import Load
from services.worker.memory.arena import Arena
from services.worker.memory.kv_blocks import KvLayout
from services.worker.memory.prefix_cache import PrefixCache
from services.worker.memory.reclaimer import Reclaimer
from services.worker.request import AdapterSet, Request, SamplingParams
from services.worker.scheduling.limits import SchedulerLimits
from services.worker.scheduling.policies import first_come
from services.worker.scheduling.scheduler import Scheduler

NUM_RUNNING, NUM_ADAPTERS, NUM_PROMPT, MAX_TOKENS = 256, 100, 64, 512
NUM_BLOCKS, TOKENS_PER_BLOCK, BLOCKS_PER_ADAPTER = 16_000, 16, 4


class Engine:
    """The scheduler's surroundings, with tokens for free."""

    def __init__(self, num_waiting: int, max_running: int) -> None:
        self.arena = Arena(NUM_BLOCKS)
        reclaimer = Reclaimer(self.arena)
        self.cache = AdapterCache(
            self.arena, reclaimer, max_resident=512, max_adapter_blocks=64, max_pinned_blocks=64
        )
        layout = KvLayout(TOKENS_PER_BLOCK, (None,), 2 * NUM_RUNNING * NUM_PROMPT)
        limits = SchedulerLimits(layout.max_step_tokens, max_running)
        prefixes = PrefixCache(self.arena, layout)
        self.scheduler = Scheduler(
            limits, layout, self.arena, self.cache, prefixes, reclaimer, first_come
        )
        self.now = 0.0
        digests = [f"sha256:{index}" for index in range(NUM_ADAPTERS)]
        for digest in digests:
            self.cache.fetched(digest, Path("/"), BLOCKS_PER_ADAPTER, max_rank=8)
        for index in range(NUM_RUNNING + num_waiting):
            adapters = AdapterSet(((digests[index % NUM_ADAPTERS], 1.0),))
            self.scheduler.submit(
                Request(
                    f"{index}",
                    [index] * NUM_PROMPT,
                    SamplingParams(MAX_TOKENS, 0),
                    adapters,
                    deadline_s=1e6,
                    arrival_s=index * 1e-6,
                )
            )

    def step(self) -> float:
        """One step; returns the processor seconds of planning and taking in."""
        self.now += 0.05
        begin_s = time.thread_time()
        assert not self.scheduler.hopeless(self.now)
        plan = self.scheduler.plan(self.now)
        for action in self.cache.take_actions():
            if isinstance(action, Load):
                self.cache.loaded(action.digest)
        if plan.rows:
            self.scheduler.launched(plan)
            self.scheduler.landed(plan)
        for row in plan.rows:
            if row.needs_logits:
                row.request.take(1)
                self.scheduler.took(row.request)
        _ = self.scheduler.queued_tokens
        return time.thread_time() - begin_s


def measure(num_waiting: int, num_steps: int, max_running: int) -> float:
    """Median processor seconds of a step with `NUM_RUNNING` requests decoding."""
    engine = Engine(num_waiting, max_running)
    while engine.scheduler.num_running < NUM_RUNNING:
        engine.step()
    engine.step()
    gc.collect()
    gc.freeze()
    return statistics.median(engine.step() for _ in range(num_steps))


def main() -> None:
    """Print a table and write `results/<machine>/plan_cost.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=50.0, help="a step to compare with (50)")
    parser.add_argument("--steps", type=int, default=100, help="steps measured (100)")
    args = parser.parse_args()
    rows = []
    print(f"{'waiting':>8} {'ms':>8} {'of a step':>10}")
    for num_waiting in (0, 1_000, 10_000):
        plan_s = measure(num_waiting, args.steps, NUM_RUNNING)
        share = plan_s * 1e3 / args.step_ms
        rows.append({"num_waiting": num_waiting, "plan_s": plan_s, "share_of_step": share})
        print(f"{num_waiting:>8} {plan_s * 1e3:>8.2f} {share:>10.2%}")
    write_results("plan_cost", {"step_ms": args.step_ms, "num_running": NUM_RUNNING, "rows": rows})


if __name__ == "__main__":
    main()
