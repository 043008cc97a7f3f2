"""Simulated: overload and fairness of a whole gateway in front of simulated workers.

    python -m benchmarks run scheduling.overload [--seconds 40] [--seed 0]

The gateway's own admission, rates, routing, relay and sessions run over simulated workers of a
fixed speed. The capacity is measured first, with as many clients as keep every worker full. Then
twice that arrives (Poisson), each request with a deadline; and the same at a fleet that has served
nothing yet. Last, a polite tenant asks for a quarter of the capacity while a greedy one asks for
its share, which is the rest, and then for ten times that. Deterministic: the machine's clock is not
read. Writes results/<machine kind>/overload.json.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from dataclasses import asdict, dataclass

from benchmarks.machine import write_results
from loraplex.api.request import TokenPrompt
from loraplex.api.sampling import Sampling
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.request import GenerateCall
from loraplex_services.simulate.virtual_loop import run_virtually
from tests.gateway.simulated.house import House, Seen
from tests.gateway.simulated.worker import BASE_ID, Speed

NUM_WORKERS = 4
SPEED = Speed(step_s=0.02, row_s=0.0005, prefill_tokens_per_s=8000.0, batch=16)
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 24
DEADLINE_S = 3.0
WARM_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class Overload:
    """Of requests that arrived after the warm-up."""

    capacity_per_s: float
    offered_over_capacity: float
    goodput_over_capacity: float
    """Requests finished within their deadline, over what the workers can do."""
    accepted_in_time: float
    """Of those that a worker was given."""
    refusals_over_excess: float
    """Refused requests over those offered beyond capacity."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """The polite tenant's 95th percentile of the time to its first token."""

    beside_share_ms: float
    beside_ten_shares_ms: float
    ratio: float


def _call(number: int, tenant: str, rng: random.Random, timeout_s: float | None) -> GenerateCall:
    sampling = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompt = TokenPrompt(tuple(rng.randrange(256) for _ in range(PROMPT_TOKENS)))
    return GenerateCall(
        request_id=f"r{number}",
        tenant=tenant,
        model=BASE_ID,
        prompt=prompt,
        sampling=sampling,
        timeout_s=timeout_s,
    )


async def _house(seed: int) -> House:
    house = House(seed, workers=[f"w{n}" for n in range(NUM_WORKERS)], speed=SPEED)
    await house.start(1, AdmissionLimits())
    return house


async def capacity(seed: int, seconds: float) -> float:
    """Requests a second when every worker always has a full batch."""
    house, rng = await _house(seed), random.Random(seed)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + WARM_UP_S + seconds
    ended: list[float] = []

    async def client(place: int) -> None:
        number = place
        while loop.time() < end_s:
            await house.ask(house.gateways[0], _call(number, "t", rng, None))
            ended.append(loop.time())
            number += 1000

    await asyncio.gather(*[client(n) for n in range(2 * NUM_WORKERS * SPEED.batch)])
    await house.close()
    return sum(end_s - seconds <= at_s < end_s for at_s in ended) / seconds


async def poisson(
    house: House, rates: dict[str, float], seed: int, seconds: float, warm_up_s: float
) -> list[Seen]:
    """Arrivals of several tenants; returns what each client got, the warm-up's left out."""
    loop, clients = asyncio.get_running_loop(), []
    start_s = loop.time()

    async def arrivals(tenant: str, rate: float) -> None:
        rng, number = random.Random(f"{seed}/{tenant}"), 0
        while loop.time() < start_s + warm_up_s + seconds:
            await asyncio.sleep(rng.expovariate(rate))
            number += 1
            call = _call(number, tenant, rng, DEADLINE_S)
            clients.append(asyncio.create_task(house.ask(house.gateways[0], call)))

    await asyncio.gather(*[arrivals(tenant, rate) for tenant, rate in rates.items()])
    seen = await asyncio.gather(*clients)
    return [each for each in seen if each.began_s >= start_s + warm_up_s]


async def overload(
    seed: int, seconds: float, per_s: float, warm_up_s: float = WARM_UP_S
) -> Overload:
    """Twice what can be served."""
    house = await _house(seed)
    seen = await poisson(house, {"t": 2.0 * per_s}, seed, seconds, warm_up_s)
    await house.close()
    whole = [each for each in seen if each.is_whole]
    # A request that failed with tokens or late was given to a worker.
    accepted = [
        s for s in seen if s.is_whole or s.text_deltas or s.ended_s - s.began_s >= DEADLINE_S
    ]
    in_time = [each for each in whole if each.ended_s - each.began_s <= DEADLINE_S]
    refused = len(seen) - len(accepted)
    return Overload(
        capacity_per_s=per_s,
        offered_over_capacity=len(seen) / seconds / per_s,
        goodput_over_capacity=len(in_time) / seconds / per_s,
        accepted_in_time=len(in_time) / len(accepted),
        refusals_over_excess=refused / (len(seen) - per_s * seconds),
    )


async def fairness(seed: int, seconds: float, per_s: float) -> Fairness:
    """A polite tenant at a quarter of the capacity beside one at the rest and at ten rests."""
    p95 = []
    for shares in (1.0, 10.0):
        house = await _house(seed)
        rates = {"greedy": shares * per_s * 0.75, "polite": per_s / 4}
        seen = await poisson(house, rates, seed, seconds, WARM_UP_S)
        await house.close()
        polite = [s for s in seen if s.prepared and s.prepared.call.tenant == "polite"]
        assert all(each.is_whole for each in polite), "the polite tenant lost requests"
        waits = sorted(each.first_s - each.began_s for each in polite)
        p95.append(waits[int(0.95 * len(waits))])
    return Fairness(1e3 * p95[0], 1e3 * p95[1], p95[1] / p95[0])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Simulate overload.", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=40.0, help="simulated, after a warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="write no result")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    per_s = run_virtually(capacity(args.seed, args.seconds))
    twice = run_virtually(overload(args.seed, args.seconds, per_s))
    first = run_virtually(overload(args.seed, args.seconds / 4, per_s, warm_up_s=0.0))
    fair = run_virtually(fairness(args.seed, args.seconds, per_s))
    results = {
        name: {key: round(value, 3) for key, value in asdict(found).items()}
        for name, found in (("overload", twice), ("first_flood", first), ("fairness", fair))
    }
    print(results)
    if not args.dry_run:
        print(write_results("overload", {"simulated": True, "seconds": args.seconds, **results}))


if __name__ == "__main__":
    main()
