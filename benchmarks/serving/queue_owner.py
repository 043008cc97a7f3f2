"""The waiting queue at gateways, at workers, and at both, on a real stack of each.

    python -m benchmarks run serving.queue_owner --work-dir DIR [--rounds 2] [--per-s RATE]

`loraplex up` serves the 22M geometry of `serving.many_adapters` with two workers, and a second
gateway is started as well. Four tenants send requests for 64 adapters, none of which is on
a device at first and a third of which fit there; one of them sends ten times as many as each other.
Together they ask for twice the capacity (Poisson), which is measured first, by clients that ask
again as soon as they are answered. Every request has a deadline for its whole answer.

In each round, a stack of each kind serves the same traffic. (a) Gateways keep the queue, and
workers run first come, first served, except that the last slots of a batch stay reserved. (b)
Gateways send on what comes, and workers keep the queue. (both) As served. Prints the polite
tenants' 95th percentile of first tokens, the share of their requests that were done in time,
goodput over the capacity, and the share in time of the requests that had a first token. Writes
results/<machine kind>/queue_owner_measured.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.cpu_model import make_base
from benchmarks.machine import write_results
from benchmarks.serving.many_adapters import RANKS, SMALL, make_adapter
from demo.stack import Stack, running_stack
from loraplex.api.error_wire import from_rpc_error
from loraplex.cli.output import print_table
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.v1 import inference_pb2 as pb
from loraplex.v1 import inference_pb2_grpc
from loraplex_services.common.processes.event_loop import new_loop

SHARES = {"greedy": 10.0, "a": 1.0, "b": 1.0, "c": 1.0}
NUM_ADAPTERS, NUM_WORKERS = 64, 2
BATCH, PROMPT, OUTPUT = 16, 64, 24
WARM_UP_S = 4.0
OWNERS = {
    "(a) gateways": """
from loraplex_services.worker.scheduling import policies, scheduler

visit = scheduler.Scheduler._visit

def visit_and_pass(self, request, queue_pass, now):
    num_free = self._limits.max_running - len(self._running)
    if num_free <= 0 or self._admission.has_slot(request, now):
        return visit(self, request, queue_pass, now)
    queue_pass.walk.skip_flow()
    return True

scheduler.Scheduler._visit = visit_and_pass
policies.POLICIES["fair"] = lambda counters: policies.FIRST_COME
""",
    "(b) workers": """
from loraplex_services.gateway.admission import batch_share, dispatch_window

batch_share.BatchShare.of_tenant = lambda self, capacity, now_s: 0
dispatch_window.DispatchWindow.window = lambda self, workers: dispatch_window.Window()
""",
    "both": "",
}
"""What every process of a stack runs at its start, by where the queue is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one client saw, in seconds of the clock."""

    tenant: str
    began_s: float
    ended_s: float
    first_s: float | None
    reason: str
    """Of an error; "" = it came whole."""

    def is_in_time(self, deadline_s: float) -> bool:
        """Whether the whole answer came before the deadline."""
        return not self.reason and self.ended_s - self.began_s <= deadline_s


class Clients:
    """Sends the requests of all tenants, to each gateway in turn."""

    def __init__(self, gateways: Sequence[str], keys: Mapping[str, str], seed: int) -> None:
        self._stubs = itertools.cycle(
            [
                inference_pb2_grpc.InferenceServiceStub(grpc.aio.insecure_channel(address))
                for address in gateways
            ]
        )
        self._keys = keys
        self._rng = random.Random(seed)

    async def ask(self, tenant: str, timeout_s: float | None) -> Outcome:
        """One request, to its end."""
        ids = [self._rng.randrange(300, SMALL.vocab_size) for _ in range(PROMPT)]
        request = pb.GenerateRequest(
            model=f"lib/adapter-{self._rng.randrange(NUM_ADAPTERS)}",
            token_ids=pb.TokenIds(ids=ids),
            sampling=pb.SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0),
        )
        metadata = (("authorization", f"Bearer {self._keys[tenant]}"),)
        began_s, first_s, reason = time.monotonic(), None, ""
        try:
            stream = next(self._stubs).Generate(request, timeout=timeout_s, metadata=metadata)
            async for _ in stream:
                first_s = first_s or time.monotonic()
        except grpc.RpcError as error:
            reason = from_rpc_error(error).reason
        return Outcome(tenant, began_s, time.monotonic(), first_s, reason)

    async def capacity(self, seconds: float) -> float:
        """Requests a second of as many clients as keep every batch full."""
        begin_s = time.monotonic() + WARM_UP_S
        ended: list[float] = []

        async def client() -> None:
            while time.monotonic() < begin_s + seconds:
                ended.append((await self.ask("greedy", None)).ended_s)

        await asyncio.gather(*[client() for _ in range(2 * NUM_WORKERS * BATCH)])
        return sum(begin_s <= at_s < begin_s + seconds for at_s in ended) / seconds

    async def flood(self, per_s: float, seconds: float, timeout_s: float) -> list[Outcome]:
        """What came of requests that arrived after the warm-up."""
        begin_s, clients = time.monotonic(), []

        async def arrivals(tenant: str, rate_per_s: float) -> None:
            rng, due_s = random.Random(self._rng.random()), begin_s
            while due_s < begin_s + WARM_UP_S + seconds:
                due_s += rng.expovariate(rate_per_s)
                await asyncio.sleep(due_s - time.monotonic())
                clients.append(asyncio.create_task(self.ask(tenant, timeout_s)))

        total = sum(SHARES.values())
        await asyncio.gather(*[arrivals(t, per_s * share / total) for t, share in SHARES.items()])
        outcomes = await asyncio.gather(*clients)
        return [each for each in outcomes if each.began_s >= begin_s + WARM_UP_S]


def judged(seen: Sequence[Outcome], per_s: float, args: argparse.Namespace) -> dict[str, float]:
    """The figures of one stack in one round."""
    polite = [each for each in seen if each.tenant != "greedy"]
    waits_s = sorted(each.first_s - each.began_s for each in polite if each.first_s is not None)
    good = sum(each.is_in_time(args.deadline) for each in seen)
    return {
        "polite_p95_s": waits_s[int(0.95 * len(waits_s))],
        "polite_in_time": statistics.fmean(each.is_in_time(args.deadline) for each in polite),
        "goodput_over_capacity": good / args.seconds / per_s,
        "begun_in_time": good / sum(each.first_s is not None for each in seen),
        "offered_over_capacity": len(seen) / args.seconds / per_s,
    }


@contextmanager
def second_gateway(stack: Stack, state_dir: Path) -> Iterator[str]:
    """Another gateway of the same workers and registry; its gRPC address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    sockets = state_dir / "run"
    workers = [f"unix:{sockets / f'worker-{index}.sock'}" for index in range(NUM_WORKERS)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")} | {
        "LORAPLEX_GATEWAY_LISTEN": address,
        "LORAPLEX_HTTP_LISTEN": "127.0.0.1:0",
        "LORAPLEX_REGISTRY_ADDRESS": stack.registry,
        "LORAPLEX_WORKERS": ",".join(workers),
        "LORAPLEX_AUTH": "keys",
        "LORAPLEX_SERVICE_TOKEN_FILE": str(sockets / "service-token"),
        "LORAPLEX_DEBUG": "log-level=warning",
    }
    process = subprocess.Popen([sys.executable, "-m", "loraplex_services.gateway"], env=environ)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(30.0)


async def published(stack: Stack, admin_key: str, work_dir: Path) -> dict[str, str]:
    """Publish the adapters; returns a key for each tenant."""
    async with RegistryClient(stack.registry, Credentials(api_key=admin_key)) as admin:
        keys = {
            tenant: (await admin.admin.create_key(tenant, ["reader", "publisher"]))[1]
            for tenant in (*SHARES, "lib")
        }
    async with RegistryClient(stack.registry, Credentials(api_key=keys["lib"])) as client:
        for index in range(NUM_ADAPTERS):
            folder = work_dir / f"adapter-{index:04d}"
            make_adapter(SMALL, folder, RANKS[index % len(RANKS)], index)
            await client.upload(folder, Publication(f"adapter-{index}", public=True))
    return keys


async def measure(
    gateways: Sequence[str], keys: Mapping[str, str], per_s: float, args: argparse.Namespace
) -> tuple[float, list[Outcome]]:
    """The capacity, measured unless it is given, and what came of twice as many requests."""
    clients = Clients(gateways, keys, args.seed)
    while any([(await clients.ask("a", None)).reason for _ in gateways]):
        await asyncio.sleep(0.2)
    per_s = per_s or await clients.capacity(args.seconds)
    return per_s, await clients.flood(2.0 * per_s, args.seconds, args.deadline)


class Stacks:
    """Stacks of one state, one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._base = make_base(SMALL, args.work_dir)
        self._state_dir = args.work_dir / f"state-{secrets.token_hex(4)}"
        self._admin_key = f"lpx_bench_{secrets.token_hex(24)}"
        self._key_file = args.work_dir / "admin.key"
        self._key_file.write_text(self._admin_key)
        self._keys: dict[str, str] = {}
        os.environ["PYTHONPATH"] = str(args.work_dir / "variant")

    def run(self, owner: str, per_s: float) -> tuple[float, list[Outcome]]:
        """Serve with the queue where `owner` says; see `measure`."""
        variant = self._args.work_dir / "variant" / "sitecustomize.py"
        variant.parent.mkdir(exist_ok=True)
        variant.write_text(OWNERS[owner])
        settings = {
            "LORAPLEX_AUTH": "keys",
            "LORAPLEX_ADMIN_KEY_FILE": str(self._key_file),
            "LORAPLEX_WORKERS": str(NUM_WORKERS),
            "LORAPLEX_KV_MEMORY": self._args.arena,
            "LORAPLEX_MAX_NUM_SEQS": str(BATCH),
            "LORAPLEX_DEBUG": "log-level=warning",
            "OMP_NUM_THREADS": "1",
        }
        with (
            running_stack(self._base, "base", self._state_dir, settings) as stack,
            second_gateway(stack, self._state_dir) as other,
            asyncio.Runner(loop_factory=new_loop) as runner,
        ):
            if not self._keys:
                publishing = published(stack, self._admin_key, self._args.work_dir)
                self._keys = asyncio.run(publishing)
            return runner.run(measure([stack.grpc, other], self._keys, per_s, self._args))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; kept")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a stack in a round")
    parser.add_argument("--deadline", type=float, default=4.0, help="of whole answers, in seconds")
    parser.add_argument("--per-s", type=float, default=0.0, help="the capacity; 0 = measure it")
    parser.add_argument("--arena", default="96MiB", help="device memory of each worker")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    stacks, per_s = Stacks(args), args.per_s
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        for owner in reversed(OWNERS):
            per_s, seen = stacks.run(owner, per_s)
            rounds.append({"owner": owner, **judged(seen, per_s, args)})
            failed = Counter(each.reason for each in seen if each.reason)
            print(json.dumps(rounds[-1]), dict(failed), flush=True)
        args.seed += 1
    head = [key for key in rounds[0] if key != "owner"]
    rows = []
    for owner in OWNERS:
        own = [each for each in rounds if each["owner"] == owner]
        rows.append([owner, *(f"{statistics.median(e[key] for e in own):.3f}" for key in head)])
    print(f"capacity {per_s:.1f} requests/s")
    print_table(["QUEUE AT", *(key.upper().replace("_", " ") for key in head)], rows)
    results = {"capacity_per_s": per_s, "rounds": rounds}
    print(f"wrote {write_results('queue_owner_measured', results)}")


if __name__ == "__main__":
    main()
