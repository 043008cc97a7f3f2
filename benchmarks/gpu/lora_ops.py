"""The low-rank update of one site on a GPU: microseconds, and adapter bytes over copy bandwidth.

    python -m benchmarks.gpu.lora_ops [--vllm DIR] [--sglang DIR]
                                          [--device cpu --tiny, with TRITON_INTERPRET=1]

Sites with weights of their own are captured one after the other in a graph until they exceed the
L2 cache, so that every byte comes from memory. `shrink_us` and `expand_us` time the two launches
apart and `microseconds` both, one after the other. `base_us` is the library's base product, and
`product_us` the base product with its update as the worker computes them, which overlap or share a
launch.

`distinct-int8` has adapters of half the bytes. The mix `s2` deals ranks 64, 32, 16, 8; `s2-padded`
gives all of them 64 rows. `--vllm` and `--sglang` name folders that hold the package `vllm` or
`sglang`, whose own kernels then run on the same weights, in graphs too; `speedup` is their time
over ours. Our result is compared with plain torch before anything is timed, and theirs with ours:
if it differs by more than 2e-2, a message takes the place of the ratio.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import common
from benchmarks.gpu.checks import WrongResult, compare, relative_difference
from benchmarks.gpu.results import Results
from loraplex_services.worker.ops.linear.torch import DenseLinear
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora import triton as lora
from loraplex_services.worker.ops.lora.device_records import OutputRange
from loraplex_services.worker.ops.lora.device_tables import DeviceTables, SiteShape
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.ops.lora.side_stream import SideStream
from loraplex_services.worker.ops.lora.step_work import StepWork
from loraplex_services.worker.ops.lora.tables import SiteDelta, Slice, Tile
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from tests.worker.ops.lora.entering import enter_deltas

L2_BYTES = 256 << 20
MAX_SITES = 32
S2_RANKS = (64, 32, 16, 8)
SCALE, INT8_FACTOR = 0.5, 2e-4


@dataclass(frozen=True, slots=True)
class OpSite:
    """Widths of one site: inputs, and outputs of each stacked projection."""

    name: str
    num_inputs: int
    outputs: tuple[int, ...]


SITES = (
    OpSite("qkv", 4096, (4096, 1024, 1024)),
    OpSite("o", 4096, (4096,)),
    OpSite("gate_up", 4096, (14336, 14336)),
    OpSite("down", 14336, (4096,)),
)
TINY_SITES = (OpSite("tiny", 64, (32, 16)),)
BATCHES = (64, 1, 8, 256, 32)


class OpBench:
    """Tables of random adapters at several sites of the same widths."""

    def __init__(
        self, site: OpSite, ranks: Sequence[int], device: torch.device, tiny: bool, int8: bool
    ):
        self.site, self.num_outputs = site, sum(site.outputs)
        # The interpreter knows no bfloat16.
        self.dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
        widths = sum(site.num_inputs + out for out in site.outputs)
        self._stored = torch.int8 if int8 else self.dtype
        self.adapter_bytes = self._stored.itemsize * widths * sum(ranks)
        self.num_sites = min(MAX_SITES, max(2, -(-L2_BYTES // self.adapter_bytes)))
        if tiny:
            self.num_sites = 2
        num_bytes = self.adapter_bytes * self.num_sites
        arena = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if int8:
            arena.random_()
        else:
            arena.view(self.dtype).normal_(std=0.02)
        edges = itertools.pairwise(itertools.accumulate(site.outputs, initial=0))
        parts = tuple(OutputRange(0, begin, end - begin) for begin, end in edges)
        shape = SiteShape(site.num_inputs, parts, is_aligned=True, may_be_cut=False)
        shapes = [shape] * self.num_sites
        self.tables = DeviceTables(arena, self._stored, shapes, len(ranks), 1 << 20)
        self._position = 0
        self.deltas: list[dict[int, SiteDelta]] = []
        """The deltas of each adapter by site."""
        for slot, rank in enumerate(ranks):
            deltas = {site_id: self._delta(rank) for site_id in range(self.num_sites)}
            enter_deltas(self.tables, slot, deltas)
            self.deltas.append(deltas)
        side = SideStream(device) if device.type == "cuda" else None
        self.lora = lora.DeviceLora(self.tables, side)
        self._weights: list[Tensor] = []

    def _delta(self, rank: int) -> SiteDelta:
        slices, a, b, begin = [], [], [], 0
        for i, width in enumerate(self.site.outputs):
            slices.append(Slice(i * rank, rank, begin, width, SCALE))
            a.append(self._tile(i * rank, rank, 0, self.site.num_inputs))
            b.append(self._tile(i * rank, rank, begin, width))
            begin += width
        scale = SCALE * (INT8_FACTOR if self.tables.is_int8 else 1.0)
        scales = torch.full((rank * len(slices),), scale, device=self.tables.arena.device)
        return SiteDelta(tuple(slices), tuple(a), tuple(b), scales)

    def _tile(self, row: int, num_rows: int, column: int, width: int) -> Tile:
        flat = self.tables.arena.view(self._stored)
        data = flat[self._position : self._position + num_rows * width].view(num_rows, width)
        self._position += num_rows * width
        return Tile(row, row + num_rows, column, column + width, data)

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """y and x of one pass."""
        device = self.tables.arena.device
        generator = torch.Generator(device).manual_seed(num_rows)
        x = torch.randn(num_rows, self.site.num_inputs, device=device, generator=generator)
        y = x.new_zeros(num_rows, self.num_outputs, dtype=self.dtype)
        return y, x.to(self.dtype)

    def run_of(
        self,
        work: StepWork,
        y: Tensor,
        x: Tensor,
        *,
        shrinks: bool = True,
        expands: bool = True,
        num_sites: int | None = None,
    ) -> Callable[[], None]:
        """One pass of the two launches over the first `num_sites` sites; None = all."""

        def all_sites() -> None:
            for site_id in range(num_sites or self.num_sites):
                if shrinks:
                    lora.launch(None, x, site_id, work)
                if expands:
                    lora.launch(y, x, site_id, work)

        return all_sites

    def weights(self) -> list[Tensor]:
        """A base weight for each site."""
        while len(self._weights) < self.num_sites:
            shape = self.num_outputs, self.site.num_inputs
            empty = torch.empty(shape, dtype=self.dtype, device=self.tables.arena.device)
            self._weights.append(empty.normal_(std=0.02))
        return self._weights

    def product_of(self, runs: Sequence[RowRun], x: Tensor, work: StepWork) -> Callable[[], None]:
        """One pass of base products with their updates; a step lists its groups once."""
        weights = self.weights()
        batch = LoraBatch(tuple(runs), {}, None, self.tables, work)

        def all_sites() -> None:
            work.list_groups(len(x))
            for site_id, weight in enumerate(weights):
                self.lora.product(DenseLinear(weight), x, site_id, batch)

        return all_sites

    def run_of_peer(
        self,
        engine: str,
        path: Path,
        runs: Sequence[RowRun],
        y: Tensor,
        x: Tensor,
        num_sites: int | None = None,
    ) -> Callable[[], None]:
        """One pass of another engine's kernels, over copies of the same weights."""
        from benchmarks.gpu import peers  # needs Triton

        update = peers.load(engine, path, runs, len(x))
        sites = [
            update(y, x, [deltas[site_id] for deltas in self.deltas])
            for site_id in range(num_sites or self.num_sites)
        ]

        def all_sites() -> None:
            for run in sites:
                run()

        return all_sites


def even_runs(num_rows: int, num_adapters: int) -> list[RowRun]:
    """Rows dealt to adapters in equal parts, in order."""
    edges = [i * num_rows // num_adapters for i in range(num_adapters + 1)]
    return [RowRun(i, 1.0, edges[i], edges[i + 1]) for i in range(num_adapters)]


def main() -> int:
    """Measure, print, write; returns how many rows failed or were wrong, and are not timed."""
    args = parse_args()
    device = torch.device(args.device)
    bandwidth = common.copy_bytes_per_s(device, is_tiny=args.tiny)
    facts = {"copy_bytes_per_s": bandwidth, "peers": peer_revisions(args)}
    results = Results("lora_ops", args, **facts)
    for mix, num_rows, ranks in mixes(args.tiny):
        for site in TINY_SITES if args.tiny else SITES:
            with results.setting(f"{site.name}, {mix}, {num_rows} rows"):
                row = measure(site, mix, num_rows, ranks, device, bandwidth, args)
                results.add("rows", row)
    return results.end()


def mixes(tiny: bool) -> Iterator[tuple[str, int, list[int]]]:
    """(name, token rows, rank of each adapter)."""
    if tiny:
        yield "distinct", 2, [16, 16]
        yield "distinct-int8", 2, [16, 16]
        return
    for num_rows in BATCHES:  # a run may be cut short
        yield "distinct", num_rows, [16] * min(num_rows, 64)
        if num_rows > 1:
            yield "identical", num_rows, [16]
    yield "distinct-int8", 64, [16] * 64
    yield "s2", 64, [S2_RANKS[i % 4] for i in range(64)]
    yield "s2-padded", 64, [64] * 64


def measure(
    site: OpSite,
    mix: str,
    num_rows: int,
    ranks: list[int],
    device: torch.device,
    bandwidth: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One row of the table. Raises WrongResult."""
    bench = OpBench(site, ranks, device, args.tiny, mix.endswith("int8"))
    runs = even_runs(num_rows, len(ranks))
    y, x = bench.rows(num_rows)
    work = bench.lora.begin(runs, num_rows)
    check_values(bench, runs, y, x, work)

    def microseconds(run: Callable[[], None]) -> float:
        return time_s(run, device, args) / bench.num_sites * 1e6

    both = microseconds(bench.run_of(work, y, x))
    row: dict[str, Any] = {
        "site": site.name,
        "mix": mix,
        "rows": num_rows,
        "adapters": len(ranks),
        "microseconds": both,
        "share_of_bandwidth": bench.adapter_bytes / (both / 1e6) / bandwidth,
        "shrink_us": microseconds(bench.run_of(work, y, x, expands=False)),
        "expand_us": microseconds(bench.run_of(work, y, x, shrinks=False)),
    }
    if device.type == "cuda":
        weights = bench.weights()

        def base() -> None:
            for weight in weights:
                torch.nn.functional.linear(x, weight)

        row["base_us"] = microseconds(base)
        row["product_us"] = microseconds(bench.product_of(runs, x, work))
        row["share_of_base"] = row["base_us"] / row["product_us"]
    if len(set(ranks)) == 1 and not bench.tables.is_int8:
        row |= against_peers(bench, runs, num_rows, work, device, args)
    return row


def against_peers(
    bench: OpBench,
    runs: Sequence[RowRun],
    num_rows: int,
    work: StepWork,
    device: torch.device,
    args: argparse.Namespace,
) -> dict[str, float | str]:
    """Other engines' times over ours. Kernels whose result differs have no ratio: something else
    ran, or nothing did."""
    from benchmarks.gpu import peers  # needs Triton

    found: dict[str, float | str] = {}
    for engine, package in peers.ENGINES.items():
        if (path := getattr(args, package)) is None:
            continue
        (y, x), (own, _) = bench.rows(num_rows), bench.rows(num_rows)
        bench.run_of(work, own, x, num_sites=1)()
        try:
            bench.run_of_peer(engine, path, runs, y, x, num_sites=1)()
            compare(y, own, f"{engine}'s result and ours")
            found[f"{engine}_difference"] = relative_difference(y, own)
            run = bench.run_of_peer(engine, path, runs, y, x)
        except (peers.MissingKernels, WrongResult) as error:
            found[f"{engine}_error"] = str(error)
            continue
        except Exception as error:  # their code, against versions of Triton that they do not know
            found[f"{engine}_error"] = f"{type(error).__name__}: {error}"[:300]
            continue
        ours, theirs_s = bench.run_of(work, own, x), time_s(run, device, args)
        found[f"{engine}_microseconds"] = theirs_s / bench.num_sites * 1e6
        found[f"{engine}_speedup"] = theirs_s / time_s(ours, device, args)
    return found


def check_values(
    bench: OpBench, runs: Sequence[RowRun], y: Tensor, x: Tensor, work: StepWork
) -> None:
    """Compare the first site with plain torch. Raises WrongResult."""
    own, expected = torch.zeros_like(y), torch.zeros_like(y)
    bench.run_of(work, own, x, num_sites=1)()
    table = {(slot, 0): deltas[0] for slot, deltas in enumerate(bench.deltas)}
    portable.add_lora(expected, x, 0, LoraBatch(tuple(runs), table))
    compare(own, expected, f"our kernels at {bench.site.name} and plain torch")


def peer_revisions(args: argparse.Namespace) -> dict[str, str]:
    """The versions whose kernels ran: a checkout's commit, else what the file VERSION says."""
    found = {}
    for engine, path in (("vllm", args.vllm), ("sglang", args.sglang)):
        if path is not None:
            command = ["git", "-C", str(path), "rev-parse", "--show-toplevel", "HEAD"]
            done = subprocess.run(command, capture_output=True, text=True).stdout.split()
            is_checkout = done and not common.RESULTS.is_relative_to(done[0])
            version = path / "VERSION"
            known = version.read_text().strip() if version.exists() else "unknown"
            found[engine] = done[1] if is_checkout else known
    return found


def time_s(run: Callable[[], None], device: torch.device, args: argparse.Namespace) -> float:
    """Median seconds of a pass, from a graph where there is a GPU."""
    if device.type == "cuda":
        return common.device_median_s(common.captured(run), args.repetitions)
    return common.median_s(run, device, 1)


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = common.options_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--vllm", type=Path, help="folder that holds vllm/")
    parser.add_argument("--sglang", type=Path, help="folder that holds sglang/")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
