"""Cost of planning a step, relative to the duration of the step.

    python -m benchmarks run scheduling.plan_cost --work-dir DIR

A full batch decodes while other requests wait, each with a deadline, for one of a hundred adapters
and for one of a hundred tenants. Times giving up late requests, planning, and appending the tokens,
without a model, and prints the share of a step: when no request starts or ends, and when one ends
and another arrives in every step, so that the scheduler looks at its queue each time. With early
abort, requests give up after a minute. Without copies, no request starts: each waits for an adapter
of its own, and no copy to the device ever ends. The step is a real one of that many rows of a base
of 22M parameters (made once), the smallest base of any benchmark.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from pathlib import Path

from benchmarks.cpu.sides import OurEngine
from benchmarks.cpu_model import make_base
from benchmarks.machine import options_of, write_results
from benchmarks.serving.many_adapters import SMALL
from loraplex.api.request import AdapterSet
from loraplex.api.sampling import SamplingParams
from loraplex.cli.output import print_table
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.adapter_limits import AdapterLimits
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.scheduling.admission import reserved_slots
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.scheduling.scheduler import Scheduler
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.residency import Load

NUM_RUNNING, NUM_ADAPTERS, NUM_TENANTS, NUM_PROMPT, MAX_TOKENS = 256, 100, 100, 64, 512
NUM_BLOCKS, TOKENS_PER_BLOCK, BLOCKS_PER_ADAPTER = 16_000, 16, 4
NUM_ENDING = 1
"""Requests that end in a step, as if 256 ran that generate 256 tokens each."""
FIRST_TOKEN_S = 60.0
STEP_S = 0.05
NUM_WAITING = (0, 100, 1_000)
"""Gateways keep more than that back."""
KINDS = {
    "by default": (None, True),
    "early abort": (FIRST_TOKEN_S, True),
    "clusters": (None, True, 8),
    "no copies": (None, False),
}
"""Time for first tokens, whether copies end, cluster size."""


class Engine:
    """The scheduler's surroundings, with tokens for free."""

    def __init__(
        self,
        num_waiting: int,
        first_token_s: float | None,
        copies: bool = True,
        cluster_size: int = 0,
    ) -> None:
        """`copies`: whether copies of adapters end with the step that they begin in; otherwise,
        they never end."""
        self.copies = copies
        self.first_token_s = first_token_s
        self.num_live = NUM_RUNNING + num_waiting
        self.arena = Arena(NUM_BLOCKS)
        reclaimer = Reclaimer(self.arena)
        self.cache = AdapterCache(self.arena, reclaimer, AdapterLimits(512, 64, 64))
        layout = KvLayout(TOKENS_PER_BLOCK, (None,), 2 * NUM_RUNNING * NUM_PROMPT)
        limits = SchedulerLimits(layout.max_step_tokens, NUM_RUNNING, cluster_size=cluster_size)
        prefixes = PrefixCache(self.arena, layout)
        self.scheduler = Scheduler(
            limits,
            layout,
            self.arena,
            self.cache,
            prefixes,
            reclaimer,
        )
        self.now = 0.0
        self.numbers = itertools.count()
        num_adapters = NUM_ADAPTERS if copies else self.num_live
        self.digests = [f"sha256:{index}" for index in range(num_adapters)]
        for digest in self.digests:
            self.cache.fetched(digest, Path("/"), BLOCKS_PER_ADAPTER, max_rank=8)
        for index in range(self.num_live):
            self.submit(0.9 * FIRST_TOKEN_S * (index / self.num_live - 1.0))

    def submit(self, arrival_s: float) -> None:
        """One request more."""
        number = next(self.numbers)
        digest = self.digests[number % len(self.digests)]
        request = Request(
            f"{number}",
            [number] * NUM_PROMPT,
            SamplingParams(MAX_TOKENS, 0),
            AdapterSet(((digest, 1.0),)),
            tenant=f"tenant-{number // NUM_ADAPTERS % NUM_TENANTS}",
            deadline_s=1e6,
            arrival_s=arrival_s,
        )
        if self.first_token_s is not None:
            request.first_token_due_s = arrival_s + self.first_token_s
        self.scheduler.submit(request)

    def step(self, num_ending: int = 0) -> float:
        """One step, after which that many requests end; returns the processor seconds of all that
        the scheduler does."""
        self.now += STEP_S
        begin_s = time.thread_time()
        for request, _ in self.scheduler.expired(self.now):
            self.scheduler.remove(request.request_id, self.now)
        plan = self.scheduler.plan(self.now)
        for action in self.cache.take_actions():
            if isinstance(action, Load) and self.copies:
                self.cache.loaded(action.digest)
        if plan.rows:
            self.scheduler.on_step_launched(plan)
            self.scheduler.on_step_done(plan)
        for row in plan.rows:
            if row.needs_logits:
                row.request.take(1)
                self.scheduler.on_token(row.request)
        for row in plan.rows[:num_ending]:
            self.scheduler.remove(row.request.request_id, self.now)
        _ = self.scheduler.queued_tokens
        elapsed_s = time.thread_time() - begin_s
        while (
            num_ending and self.scheduler.num_running + self.scheduler.num_waiting < self.num_live
        ):
            self.submit(self.now)
        return elapsed_s


def measure(engine: Engine, num_steps: int, num_ending: int) -> float:
    """Median processor seconds of a step, with a full batch if adapters are copied."""
    full = NUM_RUNNING - reserved_slots(NUM_RUNNING) if engine.copies else 0
    while engine.scheduler.num_running < full:
        engine.step()
    engine.step(num_ending)
    gc.collect()
    gc.freeze()
    return statistics.median(engine.step(num_ending) for _ in range(num_steps))


def decode_step_s(work_dir: Path) -> float:
    """Median seconds of a step in which a full batch of the bare base decodes."""
    base = make_base(SMALL, work_dir)
    # There is no limit, because on slow machines prompts would wait until the first requests have
    # ended.
    engine = OurEngine(base, "auto", "auto", 900 << 20, NUM_RUNNING, max_step_s=0.0)
    prompts = [[number] * NUM_PROMPT for number in range(NUM_RUNNING)]
    return engine.run(prompts, num_adapters=0, num_tokens=40).step_s


def main() -> None:
    """Print a table and write `results/<machine>/plan_cost.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="keep the base here")
    parser.add_argument("--steps", type=int, default=100, help="steps measured (100)")
    args = parser.parse_args()
    step_s = decode_step_s(args.work_dir)
    rows, lines = [], []
    for (name, kind), num_ending in itertools.product(KINDS.items(), (0, NUM_ENDING)):
        line = [name, str(num_ending)]
        for num_waiting in NUM_WAITING:
            engine = Engine(num_waiting, *kind)
            plan_s = measure(engine, args.steps, num_ending)
            share = plan_s / step_s
            row = {"kind": name, "num_ending": num_ending, "num_waiting": num_waiting}
            rows.append({**row, "plan_s": plan_s, "share_of_step": share})
            line.append(f"{plan_s * 1e3:.2f} ms {share:.2%}")
        lines.append(line)
    print(f"a step of {NUM_RUNNING} rows: {step_s * 1e3:.0f} ms")
    print_table(["KIND", "END A STEP", "NONE WAIT", "100", "1,000"], lines)
    write_results("plan_cost", {"step_ms": step_s * 1e3, "rows": rows}, args)


if __name__ == "__main__":
    main()
