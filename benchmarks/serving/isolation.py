"""Effect of one tenant's worst traffic on another's ordinary traffic, for each shared resource.

    python -m benchmarks run serving.isolation [--rounds 3] [--seconds 6] [--only RESOURCE,...]

`loraplex up` serves the demo base with API keys. In each round the ordinary tenant runs for the
same time alone, alongside an attacker, and alongside the control: processes that have nothing to do
with Loraplex and compute as much as the services did for the attacker, at the same priorities. A
ratio is the median over the rounds of p99 alongside the attacker over p99 of the control, or over
p99 alone. The control takes from the ratio what any work costs on a machine with so few cores. It
leaves what tenants do to each other in what they share: queues, locks, event loops, steps. The
attackers' clients get only the time that no other process wants, because they share the machine
with the servers. Each row has the attacker's requests per second, by how they ended. With `--only`,
the rows of other resources are kept.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import options_of, read_results, write_results
from benchmarks.measuring import p99
from benchmarks.serving.isolation_attacks import (
    ATTACKS,
    LIMITED,
    LOOPING_ADAPTER,
    NUM_OWN_ADAPTERS,
)
from benchmarks.serving.isolation_traffic import Target, Waits, ordinary_traffic
from benchmarks.serving.service_processes import PeakMemory, ProcessorTime, service_time
from demo.stack import Stack, running_stack
from loraplex.api.tenants import Tenant
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex_services.common.processes.piped_process import NICE

DEMO = Path(__file__).parents[2] / "demo"
BASE_ID = "base"
CACHE_BYTES = "4MiB"
LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
_SETTLE_S = 1.0
_COMPUTE = """
import os, sys, time
share, nice = float(sys.argv[1]), int(sys.argv[2])
os.nice(nice)
while True:
    begin_s = time.thread_time()
    while time.thread_time() - begin_s < 0.02 * share:
        pass
    time.sleep(0.02 * (1 - share))
"""
"""What a process of the control runs: a part of each 20 ms, as services compute between waits."""
Cores = tuple[float, float]
"""Processor time a second, at the usual priority and at that of pools."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tenants of one stack."""

    ordinary: Target
    attacker: Target
    limited: Target
    """Another attacker, which the operator lets run 4 sequences at a time."""


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    rows = read_results("isolation")["rows"] if args.only else {}
    with isolated_stack() as tenants:
        for resource in args.only or ATTACKS:
            rows[resource] = measured(tenants, resource, args.rounds, args.seconds)
            print(_row(resource, rows[resource]), flush=True)
    write_results("isolation", {"rows": {name: rows[name] for name in ATTACKS if name in rows}})


def parse_args() -> Namespace:
    """Options."""
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each half of a round")
    parser.add_argument(
        "--only", type=_resources, default=[], metavar="NAMES", help=f"of {', '.join(ATTACKS)}"
    )
    return parser.parse_args()


def _resources(text: str) -> list[str]:
    names = text.split(",")
    unknown = set(names) - set(ATTACKS)
    if unknown:
        raise ArgumentTypeError(f"there is no resource {', '.join(sorted(unknown))}")
    return names


@contextmanager
def isolated_stack() -> Iterator[Tenants]:
    """A stack with keys, and adapters of both tenants."""
    with tempfile.TemporaryDirectory(prefix="isolation-") as folder:
        admin_key = f"lpx_bench_{secrets.token_hex(16)}"
        key_file = Path(folder) / "admin-key"
        key_file.write_text(admin_key)
        settings = {
            "LORAPLEX_AUTH": "keys",
            "LORAPLEX_ADMIN_KEY_FILE": str(key_file),
            "LORAPLEX_CACHE_BYTES": CACHE_BYTES,
        }
        with running_stack(DEMO / "base", BASE_ID, Path(folder) / "state", settings) as stack:
            yield asyncio.run(_prepared(stack, admin_key, Path(folder)))


async def _prepared(stack: Stack, admin_key: str, folder: Path) -> Tenants:
    async with RegistryClient(stack.registry, Credentials(api_key=admin_key)) as admin:
        made = [
            await admin.admin.create_key(tenant, ["reader", "publisher"])
            for tenant in ("acme", "globex", "initech")
        ]
        await admin.admin.set_tenant(Tenant("initech", max_concurrent=4), ["max_concurrent"])
    ordinary, attacker, limited = (_target(stack, token) for _, token in made)
    async with RegistryClient(stack.registry, Credentials(api_key=ordinary.key)) as client:
        await client.upload(DEMO / "adapters" / "upper", Publication("upper"))
    async with RegistryClient(stack.registry, Credentials(api_key=attacker.key)) as client:
        for number in range(NUM_OWN_ADAPTERS):
            own = _adapter_like_upper(folder / f"own-{number}", number)
            await client.upload(own, Publication(own.name))
        looping = _adapter_like_upper(folder / LOOPING_ADAPTER, NUM_OWN_ADAPTERS)
        (looping / "chat_template.jinja").write_text(LOOP)
        await client.upload(looping, Publication(LOOPING_ADAPTER))
    return Tenants(ordinary, attacker, limited)


def _target(stack: Stack, key: str) -> Target:
    host, _, port = stack.http.removeprefix("http://").rpartition(":")
    return Target(host, int(port), stack.registry, key)


def _adapter_like_upper(folder: Path, number: int) -> Path:
    """Another adapter of the same size: one byte of its last tensor differs."""
    shutil.copytree(DEMO / "adapters" / "upper", folder)
    path = folder / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4] ^= number + 1  # the lowest bits of a float32
    path.write_bytes(data)
    return folder


def measured(tenants: Tenants, resource: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Ratios of one resource, with how requests ended and the memory of the services."""
    kind = ATTACKS[resource][-1]
    attacker = tenants.limited if resource == LIMITED else tenants.attacker
    alone, alongside, control, for_attacker = [], [], [], []
    attacks = Counter[str]()
    attacked_s = 0.0

    def traffic() -> tuple[Waits, Cores]:
        before, begin_s = service_time(), time.perf_counter()
        waits = asyncio.run(ordinary_traffic(tenants.ordinary, "upper", kind, seconds))
        return waits, _cores(service_time() - before, time.perf_counter() - begin_s)

    traffic()  # loads the adapter, and starts the processes of pools
    with PeakMemory() as memory:
        for _ in range(rounds):
            waits, cores_alone = traffic()
            alone.append(waits)
            begin_s = time.perf_counter()
            with attack(resource, attacker, attacks):
                waits, cores = traffic()
            alongside.append(waits)
            attacked_s += time.perf_counter() - begin_s
            part = len(waits.first_token_s) / len(alone[-1].first_token_s)
            for_attacker.append(
                tuple(b - part * a for a, b in zip(cores_alone, cores, strict=True))
            )
            with computing(*for_attacker[-1]):
                control.append(traffic()[0])
    return {
        "attack": ATTACKS[resource][0],
        "rounds": rounds,
        "seconds": seconds,
        "over_control": {name: _ratio(alongside, control, name) for name in _WAITS},
        "over_alone": {name: _ratio(alongside, alone, name) for name in _WAITS},
        "p99_alongside_s": {
            name: statistics.median(p99(getattr(waits, name)) for waits in alongside)
            for name in _WAITS
        },
        "cores_for_attacker": [tuple(round(cores, 2) for cores in pair) for pair in for_attacker],
        "failed_alone": sum(waits.num_failed for waits in alone),
        "failed": sum(waits.num_failed for waits in alongside),
        "requests": sum(waits.statuses.total() for waits in alongside),
        "attacker_per_s": {
            status: round(count / attacked_s, 1) for status, count in attacks.items()
        },
        "peak_mib": {name: peak >> 20 for name, peak in memory.peaks.items()},
        "p99_s": [
            {name: p99(getattr(waits, name)) for name in _WAITS}
            for waits in (*alone, *alongside, *control)
        ],
    }


def _cores(spent: ProcessorTime, seconds: float) -> Cores:
    return spent.usual_s / seconds, spent.low_s / seconds


@contextmanager
def computing(usual: float, low: float) -> Iterator[None]:
    """Processes that compute as many seconds a second, at the usual and at the pools' priority."""
    processes = []
    for cores, nice in ((usual, 0), (low, NICE)):
        for share in [1.0] * int(max(cores, 0.0)) + [max(cores, 0.0) % 1]:
            command = [sys.executable, "-c", _COMPUTE, str(share), str(nice)]
            processes.append(subprocess.Popen(command))
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def attack(resource: str, target: Target, statuses: Counter[str]) -> Iterator[None]:
    """Attack meanwhile, from a process of its own. Mutates: statuses, how its requests ended."""
    command = [sys.executable, "-m", "benchmarks.serving.isolation_attacks", resource]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=DEMO.parent
    )
    assert process.stdin is not None, "opened with a pipe"
    process.stdin.write(json.dumps(asdict(target)) + "\n")
    process.stdin.flush()
    try:
        asyncio.run(asyncio.sleep(_SETTLE_S))
        yield
    finally:
        out, _ = process.communicate(timeout=60)
        statuses.update(json.loads(out))


_WAITS = ("first_token_s", "between_tokens_s", "registry_read_s")


def _ratio(alongside: Sequence[Waits], alone: Sequence[Waits], name: str) -> float:
    ratios = [
        p99(getattr(a, name)) / p99(getattr(b, name)) for a, b in zip(alongside, alone, strict=True)
    ]
    return round(statistics.median(ratios), 2)


def _row(resource: str, result: dict[str, Any]) -> str:
    """The row of the table in docs/operate/threat-model.md, and below it what explains it."""
    cells = [
        f"{result['over_control'][name]} ({result['over_alone'][name]} of alone, "
        f"{1e3 * result['p99_alongside_s'][name]:.0f} ms)"
        for name in _WAITS
    ]
    failed = f"{result['failed']} of {result['requests']}"
    peaks = ", ".join(f"{name} {mib} MiB" for name, mib in result["peak_mib"].items())
    return (
        f"| {' | '.join([resource, result['attack'], *cells, failed])} |\n"
        f"  cores for the attacker {result['cores_for_attacker']}; {result['failed_alone']} failed "
        f"alone; attacker {result['attacker_per_s']} per second; peaks: {peaks}"
    )


if __name__ == "__main__":
    main()
