"""Latency that the gateway adds to a first token, and tokens that one core of it relays.

    python -m benchmarks run serving.gateway [--rounds 3] [--streams 200]

A real gateway process runs between scripted clients and a scripted worker, with real sockets. The
added latency is the round trip of a call to the gateway, less that of the same kind of call
straight to the worker (`WorkerService.Generate`), both less the time that the worker held them.
Both kinds alternate while `--streams` other streams run. Results are also printed less a message on
a session that is already open, which no client has. The 99th percentile is that of the gateway,
less the median of direct calls, which charges the gateway for the stutter of the machine, and less
the same percentile of direct calls. Relayed tokens are per second of the gateway's processor time,
so other work on the machine does not count. Writes results/<machine kind>/gateway.json.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.machine import options_of, write_results
from benchmarks.measuring import p99
from benchmarks.serving.gateway_worker import PROBE_ID
from loraplex.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.gateway.scripted_registry import ScriptedRegistry, start_registry
from tests.servers import free_port

HERE = Path(__file__).parent
REPO = HERE.parents[1]
IDLE_STEP_S, LOADED_STEP_S = 0.05, 0.002
"""Latency is probed alongside streams of 20 tokens a second; for throughput the worker never
waits."""
LOAD_TOKENS = 1 << 12
"""Tokens of a stream that others are probed alongside: more than the probes take, and few enough
that the gateway does not refuse it for its deadline."""


class House:
    """The processes of one run and where they listen."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.http_port = free_port()
        self.grpc = f"unix:{folder}/gateway.sock"
        self.worker = f"unix:{folder}/worker.sock"
        self._folder = folder
        self._step_s = step_s
        self.gateway: subprocess.Popen[bytes]

    @contextmanager
    def running(self) -> Iterator[House]:
        """Worker and gateway; the registry is the caller's."""
        worker = _python(
            str(HERE / "gateway_worker.py"), "--listen", self.worker, "--step-s", str(self._step_s)
        )
        env = {
            "LORAPLEX_WORKERS": self.worker,
            "LORAPLEX_REGISTRY_ADDRESS": f"unix:{self._folder}/registry.sock",
            "LORAPLEX_GATEWAY_LISTEN": self.grpc,
            "LORAPLEX_HTTP_LISTEN": f"127.0.0.1:{self.http_port}",
            "LORAPLEX_DEBUG": "log-level=warning",
        }
        self.gateway = _python("-m", "loraplex_services.gateway", env=env)
        try:
            yield self
        finally:
            for process in (self.gateway, worker):
                process.kill()
                process.wait()

    async def ready(self) -> None:
        """Wait until the gateway is ready."""
        while True:
            with suppress(OSError):
                url = f"http://127.0.0.1:{self.http_port}/readyz"
                await asyncio.to_thread(urllib.request.urlopen, url)
                return
            await asyncio.sleep(0.05)

    def cpu_s(self) -> float:
        """CPU seconds of the gateway so far."""
        times = psutil.Process(self.gateway.pid).cpu_times()
        return float(times.user + times.system)

    def load(self, kind: str, streams: int, tokens: int) -> subprocess.Popen[bytes]:
        """Start a process with clients that read streams."""
        address = self.grpc if kind == "ids" else f"127.0.0.1:{self.http_port}"
        return _python(
            str(HERE / "gateway_load.py"),
            *("--kind", kind, "--address", address),
            *("--streams", str(streams), "--tokens", str(tokens)),
            output=subprocess.PIPE,
        )


async def probe(stub: inference_pb2_grpc.InferenceServiceStub) -> float:
    """Milliseconds that the gateway added to one first token."""
    request = inference_pb2.GenerateRequest(
        model="base",
        token_ids=inference_pb2.TokenIds(ids=[PROBE_ID]),
        sampling=inference_pb2.SamplingParams(max_tokens=16),
    )
    start_s = time.monotonic()
    async for message in stub.Generate(request):
        elapsed_ms = (time.monotonic() - start_s) * 1e3
        return elapsed_ms - int(bytes(message.token_ids)) / 1e3
    raise RuntimeError("the probe got no answer")


async def call_worker(stub: worker_pb2_grpc.WorkerServiceStub) -> float:
    """Milliseconds of the same call, sent directly to the worker."""
    request = worker_pb2.WorkerServiceGenerateRequest(
        request=worker_pb2.WorkerRequest(
            request_id="straight",
            prompt_ids=[PROBE_ID],
            sampling=worker_pb2.WorkerSampling(max_tokens=16),
        )
    )
    start_s = time.monotonic()
    async for message in stub.Generate(request):
        elapsed_ms = (time.monotonic() - start_s) * 1e3
        return elapsed_ms - int(bytes(message.event.token_ids)) / 1e3
    raise RuntimeError("the probe got no answer")


class StraightProbe:
    """A session with the worker, over which a probe reaches it without the gateway."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = worker_pb2_grpc.WorkerServiceStub(channel).Session()
        self._number = 0

    async def open(self) -> None:
        """Open the session."""
        hello = worker_pb2.SessionHello(gateway_id="probe")
        await self._call.write(worker_pb2.SessionRequest(hello=hello))
        await self._call.read()

    async def probe(self) -> float:
        """The milliseconds that a message and its answer take on the way."""
        self._number += 1
        submit = worker_pb2.WorkerRequest(
            request_id=f"p{self._number}",
            prompt_ids=[PROBE_ID],
            sampling=worker_pb2.WorkerSampling(max_tokens=16),
        )
        start_s = time.monotonic()
        await self._call.write(worker_pb2.SessionRequest(submit=submit))
        message = await self._call.read()
        elapsed_ms = (time.monotonic() - start_s) * 1e3
        return elapsed_ms - int(bytes(message.events.tokens[0].token_ids)) / 1e3


async def added_latency(folder: Path, streams: int, num_probes: int) -> dict[str, float]:
    """Added milliseconds alongside `streams` other streams, and alongside none."""
    with House(folder, IDLE_STEP_S).running() as house:
        await house.ready()
        async with (
            grpc.aio.insecure_channel(house.grpc) as channel,
            grpc.aio.insecure_channel(house.worker) as worker_channel,
        ):
            ways = Ways(channel, worker_channel)
            await ways.open()
            alone = await ways.probe(num_probes)
            load = house.load("ids", streams, LOAD_TOKENS)
            await asyncio.sleep(6.0)
            alongside = await ways.probe(num_probes)
            load.kill()
            load.wait()
    median = {name: statistics.median(values) for name, values in alongside.items()}
    idle = {name: statistics.median(values) for name, values in alone.items()}
    return {
        "alone_median_ms": idle["gateway"] - idle["call"],
        "median_ms": median["gateway"] - median["call"],
        "p99_ms": p99(alongside["gateway"]) - median["call"],
        "p99_over_p99_ms": p99(alongside["gateway"]) - p99(alongside["call"]),
        "over_session_median_ms": median["gateway"] - median["session"],
        "over_session_p99_ms": p99(alongside["gateway"]) - median["session"],
        "gateway_median_ms": median["gateway"],
        "call_median_ms": median["call"],
        "call_p99_ms": p99(alongside["call"]),
        "session_median_ms": median["session"],
    }


class Ways:
    """Three ways to a first token: through the gateway, and two straight to the worker."""

    def __init__(self, gateway: grpc.aio.Channel, worker: grpc.aio.Channel) -> None:
        self._gateway = inference_pb2_grpc.InferenceServiceStub(gateway)
        self._worker = worker_pb2_grpc.WorkerServiceStub(worker)
        self._session = StraightProbe(worker)

    async def open(self) -> None:
        """Open the session."""
        await self._session.open()

    async def probe(self, num_probes: int) -> dict[str, list[float]]:
        """Milliseconds of each way, measured alternately, without the first quarter."""
        found: dict[str, list[float]] = {"gateway": [], "call": [], "session": []}
        for _ in range(num_probes + num_probes // 4):
            found["gateway"].append(await probe(self._gateway))
            await asyncio.sleep(0.007)
            found["call"].append(await call_worker(self._worker))
            await asyncio.sleep(0.006)
            found["session"].append(await self._session.probe())
            await asyncio.sleep(0.005)
        return {name: values[num_probes // 4 :] for name, values in found.items()}


async def relayed(folder: Path, kind: str, streams: int, tokens: int) -> dict[str, float]:
    """Tokens for each second of the gateway's CPU, and for each second of the clock."""
    with House(folder, LOADED_STEP_S).running() as house:
        await house.ready()
        warm = house.load(kind, 8, 50)
        await asyncio.to_thread(warm.communicate)
        cpu_s, start_s = house.cpu_s(), time.monotonic()
        load = house.load(kind, streams, tokens)
        out, _ = await asyncio.to_thread(load.communicate)
        wall_s = time.monotonic() - start_s
        used_s = house.cpu_s() - cpu_s
    assert int(out) == streams * tokens, f"{int(out)} of {streams * tokens} tokens arrived"
    return {"tokens_per_cpu_s": int(out) / used_s, "tokens_per_s": int(out) / wall_s}


async def run(args: Namespace) -> dict[str, Any]:
    """All measurements, their kinds alternating; medians over rounds."""
    rounds: dict[str, list[dict[str, float]]] = {"latency": [], "ids": [], "sse": []}
    for _ in range(args.rounds):
        for name, found in rounds.items():
            with tempfile.TemporaryDirectory() as path:
                folder = Path(path)
                registry = await start_registry(ScriptedRegistry(), f"unix:{folder}/registry.sock")
                if name == "latency":
                    found.append(await added_latency(folder, args.streams, args.probes))
                else:
                    found.append(await relayed(folder, name, args.streams, args.tokens))
                await registry.stop(None)
            print(name, {key: round(value, 2) for key, value in found[-1].items()}, flush=True)
    results: dict[str, Any] = {
        name: {key: round(statistics.median(r[key] for r in found), 2) for key in found[0]}
        for name, found in rounds.items()
    }
    pairs = zip(rounds["ids"], rounds["sse"], strict=True)
    ratios = [ids["tokens_per_cpu_s"] / sse["tokens_per_cpu_s"] for ids, sse in pairs]
    return results | {"ids_over_sse": round(statistics.median(ratios), 2)}


def _python(
    *command: str, env: dict[str, str] | None = None, output: int | None = None
) -> subprocess.Popen[bytes]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}
    clean |= {"PYTHONPATH": str(REPO), **(env or {})}
    return subprocess.Popen([sys.executable, *command], env=clean, cwd=REPO, stdout=output)


def main() -> None:
    """Entry point."""
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=150, help="of each stream, for throughput")
    parser.add_argument("--probes", type=int, default=300)
    args = parser.parse_args()
    before = round(os.getloadavg()[0], 1)
    results = asyncio.run(run(args))
    write_results("gateway", {"load_average_before": before, **results}, args)


if __name__ == "__main__":
    main()
