"""Simulated: overload and fairness of a gateway before workers.

    python -m benchmarks run scheduling.overload [--seconds 40] [--seed 0]

The gateway's own admission and routing run over engines with their own scheduler, whose steps take
a fixed time. The capacity is measured first, with more requests than run. Then twice that arrives
(Poisson), each request with a deadline; and the same at a fleet that has served nothing yet. Last,
a polite tenant asks for a quarter of the capacity while a greedy one asks for its share, which is
the rest, and then for ten times that. Deterministic: the machine's clock is not read. Writes
results/simulated/overload.json.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from benchmarks.machine import options_of, write_results
from benchmarks.scheduling.slora_worker import COSTS
from loraplex.workload import RequestOutcome, TracedRequest
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation
from loraplex_services.worker.types.messages import EngineConfig

NUM_WORKERS, BATCH = 4, 16
STEPS = replace(
    COSTS,
    step_s=0.02,
    idle_s=0.0,
    row_s=0.0005,
    many_row_s=0.0,
    prompt_s=0.0,
    token_s=1 / 8000,
    kv_token_s=0.0,
    request_s=0.0,
    request_p90_s=0.0,
)
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 24
DEADLINE_S = 3.0
WARM_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class Overload:
    """Figures of the requests that arrived after the warm-up."""

    capacity_per_s: float
    offered_over_capacity: float
    goodput_over_capacity: float
    """Requests finished within their deadline, over what the workers can do."""
    accepted_in_time: float
    """The share in time of the requests that a worker received."""
    refusals_over_excess: float
    """Refused requests over those offered beyond capacity."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """The polite tenant's 95th percentile of the time to its first token; a refused request has
    none, ever."""

    beside_share_ms: float
    beside_ten_shares_ms: float
    ratio: float


def _fleet(deadline_s: float | None) -> SimulatedFleet:
    engine = EngineConfig(
        model_dir="",
        device="simulated",
        dtype="float16",
        arena_bytes=4 << 30,
        max_lora_rank=8,
        max_resident=8,
        max_num_batched_tokens=2048,
        max_num_seqs=BATCH,
    )
    return SimulatedFleet(
        STEPS,
        engine,
        NUM_WORKERS,
        on_disk=True,
        deadline_s=deadline_s,
        admission=AdmissionLimits(),
    )


def _request(arrival_s: float, tenant: str) -> TracedRequest:
    return TracedRequest(arrival_s, None, PROMPT_TOKENS, OUTPUT_TOKENS, tenant)


def capacity(seconds: float) -> float:
    """Requests a second when every worker always has a full batch."""
    num_requests = int(seconds * 100)
    outcomes = Simulation(_fleet(None), []).run([_request(0.0, "t")] * num_requests)
    ends_s = sorted(outcome.end_s for outcome in outcomes)
    tenth = num_requests // 10  # filling and emptying the batches are left out
    return 8 * tenth / (ends_s[9 * tenth] - ends_s[tenth])


def poisson(
    rates: Mapping[str, float], seed: int, seconds: float, warm_up_s: float
) -> list[tuple[TracedRequest, RequestOutcome]]:
    """Requests of several tenants and their outcomes, without those of the warm-up."""

    def arrivals(tenant: str, rate: float) -> list[TracedRequest]:
        rng, now_s, requests = random.Random(f"{seed}/{tenant}"), 0.0, []
        while (now_s := now_s + rng.expovariate(rate)) < warm_up_s + seconds:
            requests.append(_request(now_s, tenant))
        return requests

    traces = [arrivals(tenant, rate) for tenant, rate in rates.items()]
    trace = list(heapq.merge(*traces, key=lambda request: request.arrival_s))
    outcomes = Simulation(_fleet(DEADLINE_S), []).run(trace)
    return [pair for pair in zip(trace, outcomes, strict=True) if pair[0].arrival_s >= warm_up_s]


def _is_in_time(outcome: RequestOutcome) -> bool:
    return outcome.finished and outcome.end_s - outcome.arrival_s <= DEADLINE_S


def overload(seed: int, seconds: float, per_s: float, warm_up_s: float = WARM_UP_S) -> Overload:
    """Twice what can be served."""
    seen = [o for _, o in poisson({"t": 2.0 * per_s}, seed, seconds, warm_up_s)]
    begun = [outcome for outcome in seen if outcome.first_token_s is not None]
    num_in_time = sum(map(_is_in_time, seen))
    return Overload(
        capacity_per_s=per_s,
        offered_over_capacity=len(seen) / seconds / per_s,
        goodput_over_capacity=num_in_time / seconds / per_s,
        accepted_in_time=num_in_time / len(begun),
        refusals_over_excess=(len(seen) - len(begun)) / (len(seen) - per_s * seconds),
    )


def _first_token_s(outcome: RequestOutcome) -> float:
    wait_s = outcome.first_token_latency_s
    return math.inf if wait_s is None else wait_s


def fairness(seed: int, seconds: float, per_s: float) -> Fairness:
    """A polite tenant at a quarter of the capacity alongside one at the rest and at ten rests."""
    p95 = []
    for shares in (1.0, 10.0):
        rates = {"greedy": shares * per_s * 0.75, "polite": per_s / 4}
        seen = poisson(rates, seed, seconds, WARM_UP_S)
        waits_s = sorted(_first_token_s(o) for request, o in seen if request.tenant == "polite")
        p95.append(waits_s[int(0.95 * len(waits_s))])
    return Fairness(1e3 * p95[0], 1e3 * p95[1], p95[1] / p95[0])


def main() -> None:
    """Entry point."""
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="simulated, after a warm-up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    per_s = capacity(args.seconds)
    twice = overload(args.seed, args.seconds, per_s)
    first = overload(args.seed, args.seconds / 4, per_s, warm_up_s=0.0)
    fair = fairness(args.seed, args.seconds, per_s)
    results = {
        name: {key: round(value, 3) for key, value in asdict(found).items()}
        for name, found in (("overload", twice), ("first_flood", first), ("fairness", fair))
    }
    print(results)
    write_results("overload", {"simulated": True, **results}, args)


if __name__ == "__main__":
    main()
