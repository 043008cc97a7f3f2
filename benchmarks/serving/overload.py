"""Overload and fairness between tenants on a real stack.

    python -m benchmarks run serving.overload --work-dir DIR [--rounds 3] [--seconds 10]

`loraplex up` serves a base of real geometry (135M weights, made once). Clients of three tenants
call it over gRPC from this process. Each round measures the capacity, with as many clients as keep
the batch full; then sends twice that (Poisson), each request with a deadline; then measures the
capacity again. Afterwards a polite tenant asks for a quarter of the capacity: alone, with another
tenant that asks for the rest, and with one that asks for ten times the rest. `scheduling.overload`
says what each figure means. Figures are medians of the rounds. Writes results/<machine
kind>/overload_measured.json.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.cpu_model import SHAPES, make_base
from benchmarks.machine import options_of, write_results
from benchmarks.scheduling.overload import Overload
from demo.stack import Stack, running_stack
from loraplex.api.error_wire import from_rpc_error
from loraplex.v1 import inference_pb2 as pb
from loraplex.v1 import inference_pb2_grpc
from loraplex_services.common.processes.event_loop import new_loop

BASE_ID = "base"
TENANTS = ("polite", "greedy", "crowd")
REFUSED = ("DEADLINE_INFEASIBLE", "QUEUE_FULL")
WARM_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it; times are seconds of the clock."""

    began_s: float
    ended_s: float
    first_s: float | None
    reason: str
    """The reason of an error; "" = the answer is complete."""


class Clients:
    """Sends requests of several tenants to one gateway."""

    def __init__(self, stack: Stack, keys: Mapping[str, str], args: Namespace) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = {
            tenant: grpc.aio.insecure_channel(stack.grpc, options=options) for tenant in keys
        }
        self._keys = keys
        self._args = args
        self._numbers = itertools.count()

    async def ask(self, tenant: str, timeout_s: float | None = None) -> Outcome:
        """Send one request and wait for its end."""
        rng = random.Random(f"{self._args.seed}/{next(self._numbers)}")
        ids = [rng.randrange(300, 40_000) for _ in range(self._args.prompt)]
        sampling = pb.SamplingParams(max_tokens=self._args.output, ignore_eos=True, temperature=0)
        request = pb.GenerateRequest(
            model=BASE_ID, token_ids=pb.TokenIds(ids=ids), sampling=sampling
        )
        began_s, first_s, reason = time.monotonic(), None, ""
        stub = inference_pb2_grpc.InferenceServiceStub(self._channels[tenant])
        metadata = (("authorization", f"Bearer {self._keys[tenant]}"),)
        try:
            async for _ in stub.Generate(request, timeout=timeout_s, metadata=metadata):
                first_s = first_s or time.monotonic()
        except grpc.RpcError as error:
            reason = from_rpc_error(error).reason
        return Outcome(began_s, time.monotonic(), first_s, reason)

    async def capacity(self, num_clients: int, seconds: float) -> float:
        """Requests per second of clients that send another request after each answer."""
        begin_s = time.monotonic() + WARM_UP_S
        ended: list[float] = []

        async def client() -> None:
            while time.monotonic() < begin_s + seconds:
                outcome = await self.ask("crowd")
                assert not outcome.reason, outcome
                ended.append(outcome.ended_s)

        await asyncio.gather(*[client() for _ in range(num_clients)])
        return sum(begin_s <= at_s < begin_s + seconds for at_s in ended) / seconds

    async def poisson(
        self, rates: Mapping[str, float], seconds: float, timeout_s: float
    ) -> dict[str, list[Outcome]]:
        """Outcomes of the requests that arrived after the warm-up, by tenant."""
        begin_s = time.monotonic()
        clients: dict[str, list[asyncio.Task[Outcome]]] = {tenant: [] for tenant in rates}

        async def arrivals(tenant: str, rate: float) -> None:
            rng, due_s = random.Random(f"{self._args.seed}/{tenant}"), begin_s
            while due_s < begin_s + WARM_UP_S + seconds:
                due_s += rng.expovariate(rate)
                await asyncio.sleep(due_s - time.monotonic())
                clients[tenant].append(asyncio.create_task(self.ask(tenant, timeout_s)))

        await asyncio.gather(*[arrivals(tenant, rate) for tenant, rate in rates.items()])
        seen = {tenant: await asyncio.gather(*tasks) for tenant, tasks in clients.items()}
        return {
            tenant: [each for each in outcomes if each.began_s >= begin_s + WARM_UP_S]
            for tenant, outcomes in seen.items()
        }

    async def close(self) -> None:
        """End all connections."""
        await asyncio.gather(*[channel.close() for channel in self._channels.values()])


def judged(seen: list[Outcome], per_s: float, seconds: float, deadline_s: float) -> Overload:
    """The figures of the requests, computed as in `scheduling.overload`."""
    accepted = [each for each in seen if each.first_s or each.reason not in REFUSED]
    in_time = [s for s in accepted if not s.reason and s.ended_s - s.began_s <= deadline_s]
    return Overload(
        capacity_per_s=per_s,
        offered_over_capacity=len(seen) / seconds / per_s,
        goodput_over_capacity=len(in_time) / seconds / per_s,
        accepted_in_time=len(in_time) / len(accepted),
        refusals_over_excess=(len(seen) - len(accepted)) / (len(seen) - per_s * seconds),
    )


def first_tokens(outcomes: list[Outcome]) -> dict[str, float]:
    """First tokens of the polite tenant in milliseconds, and the share of its requests that got
    one."""
    waits = sorted(1e3 * (each.first_s - each.began_s) for each in outcomes if each.first_s)
    p50, p95 = waits[len(waits) // 2], waits[int(0.95 * len(waits))]
    return {"p50_ms": p50, "p95_ms": p95, "served": len(waits) / len(outcomes)}


async def one_round(clients: Clients, args: Namespace) -> dict[str, Any]:
    """All figures once."""
    before = await clients.capacity(args.clients, args.seconds)
    seen = await clients.poisson({"crowd": 2.0 * before}, args.seconds, args.deadline)
    after = await clients.capacity(args.clients, args.seconds)
    per_s = (before + after) / 2
    overload = judged(seen["crowd"], per_s, args.seconds, args.deadline)
    fair = {}
    for name, shares in (("alone", 0.0), ("beside_share", 1.0), ("beside_ten_shares", 10.0)):
        rates = {"polite": per_s / 4} | ({"greedy": shares * per_s * 0.75} if shares else {})
        outcomes = await clients.poisson(rates, args.fair_seconds, args.deadline)
        fair[name] = first_tokens(outcomes["polite"])
    return {"capacity": [before, after], "overload": asdict(overload), "polite": fair}


async def run(stack: Stack, keys: Mapping[str, str], args: Namespace) -> dict[str, Any]:
    """Every round, and medians."""
    clients = Clients(stack, keys, args)
    await clients.capacity(args.clients, 1.0)
    rounds = []
    for _ in range(args.rounds):
        rounds.append(await one_round(clients, args))
        print(json.dumps(rounds[-1], default=float), flush=True)
    await clients.close()
    overload = {
        key: round(statistics.median(r["overload"][key] for r in rounds), 3)
        for key in rounds[0]["overload"]
    }
    p95 = {
        name: [r["polite"][name]["p95_ms"] for r in rounds]
        for name in ("alone", "beside_share", "beside_ten_shares")
    }
    fairness = {f"{name}_ms": round(statistics.median(found), 1) for name, found in p95.items()}
    pairs = list(zip(p95["beside_ten_shares"], p95["beside_share"], strict=True))
    fairness["ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    return {"overload": overload, "fairness": fairness, "rounds": rounds}


def registry(stack: Stack, key: str, *command: str) -> str:
    """Run `registry` as an admin; what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "loraplex.cli.registry", *command, "--registry", stack.registry],
        env=os.environ | {"LORAPLEX_API_KEY": key},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def main() -> None:
    """Measure, print, write."""
    parser = options_of(__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="keep the base here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part of a round")
    parser.add_argument("--fair-seconds", type=float, default=15.0)
    parser.add_argument("--batch", type=int, default=32, help="of the worker")
    parser.add_argument("--clients", type=int, default=48, help="that keep it full")
    parser.add_argument("--deadline", type=float, default=4.0)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    base = make_base(SHAPES["135m"], args.work_dir)
    admin = f"lpx_bench_{secrets.token_hex(24)}"
    key_file = args.work_dir / "admin.key"
    key_file.write_text(admin)
    settings = {
        "LORAPLEX_AUTH": "keys",
        "LORAPLEX_ADMIN_KEY_FILE": str(key_file),
        "LORAPLEX_MAX_NUM_SEQS": str(args.batch),
        "LORAPLEX_DEBUG": "prefix-cache=off,log-level=warning",
        "OMP_NUM_THREADS": "1",
    }
    with running_stack(base, BASE_ID, args.work_dir / "overload-state", settings) as stack:
        keys = {
            tenant: registry(stack, admin, "keys", "create", "--tenant", tenant)
            for tenant in TENANTS
        }
        with asyncio.Runner(loop_factory=new_loop) as runner:
            results = runner.run(run(stack, keys, args))
    print(json.dumps({key: results[key] for key in ("overload", "fairness")}))
    write_results("overload_measured", results, args)


if __name__ == "__main__":
    main()
