"""The tilings that serve half precision, at the widths of an 8B model, against float64.

The other tests of these kernels use small tilings, since the interpreter takes seconds for each
real one: those run here, on a GPU only, as the worker chooses them for a step.
"""

import itertools
import random

import pytest
import torch

from loraplex_services.worker.ops.attention.reference import attention
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.lora import reference
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora import triton as fast
from loraplex_services.worker.ops.lora.device_records import OutputRange
from loraplex_services.worker.ops.lora.device_tables import DeviceTables, SiteShape
from loraplex_services.worker.ops.lora.long_runs import make_long_work
from loraplex_services.worker.ops.lora.runs import RowRun, divided
from loraplex_services.worker.ops.lora.tables import SiteDelta, Slice
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from tests.worker.ops.lora.entering import enter_deltas
from tests.worker.ops.triton.adapters import PackedArena
from tests.worker.ops.triton.conftest import INTERPRETING
from tests.worker.ops.triton.test_attention import make_step, run_step

pytestmark = pytest.mark.skipif(INTERPRETING, reason="takes hours under the interpreter")

BLOCK_BYTES = 2 << 20
RANKS = (8, 16, 64, 256, 16, 33)
"""By slot; the last is no multiple of any tile."""
SITES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
"""(inputs, outputs of each stacked module)."""
STEPS = {
    "one row": [(0, 1)],
    "a row for each adapter": [(slot, 1) for slot in range(6)],
    "short runs": [(0, 3), (1, 16), (2, 1), (3, 17), (5, 2)],
    "a decode of 256 rows": [(slot, 42) for slot in range(6)],
    "a mixed step": [(3, 300), *((slot, 1) for slot in (0, 1, 2, 4, 5))],
    "a prefill": [(0, 300), (1, 700), (2, 65), (3, 400)],
    "one prompt": [(3, 1500)],
}
"""Runs of a step as (slot, rows)."""
NUM_CHECKED_ROWS = 48
EPS = 2.0**-8
"""Of bfloat16: the largest relative error of a value that is rounded twice."""


def plain_delta(arena, num_inputs, widths, rank, generator) -> SiteDelta:
    """An adapter of one rank at all modules of a site, as it is packed for bfloat16."""
    device = arena.data.device
    slices, a, b, begin = [], [], [], 0
    for i, width in enumerate(widths):
        slices.append(Slice(i * rank, rank, begin, width, 2.0))
        a_rows = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
        b_rows = torch.randn(rank, width, generator=generator) * 0.3 * rank**-0.5
        a += arena.put(a_rows.bfloat16().to(device), i * rank)
        b += arena.put(b_rows.bfloat16().to(device), i * rank, begin)
        begin += width
    scales = torch.full((rank * len(widths),), 2.0, device=device)
    return SiteDelta(tuple(slices), tuple(a), tuple(b), scales)


class Stage:
    """A site's adapters on the device, and the kernels as a worker has them."""

    def __init__(self, site, device):
        self.num_inputs, self.widths = SITES[site]
        generator = torch.Generator().manual_seed(0)
        arena = PackedArena(128, BLOCK_BYTES, device, random.Random(0))
        deltas = [
            plain_delta(arena, self.num_inputs, self.widths, rank, generator) for rank in RANKS
        ]
        edges = itertools.pairwise(itertools.accumulate(self.widths, initial=0))
        parts = tuple(OutputRange(0, begin, end - begin) for begin, end in edges)
        shape = SiteShape(self.num_inputs, parts, is_aligned=True, may_be_cut=False)
        self.tables = DeviceTables(arena.data.view(-1), torch.bfloat16, [shape], len(RANKS), 4000)
        for slot, delta in enumerate(deltas):
            enter_deltas(self.tables, slot, {0: delta})
        self.table = {(slot, 0): delta for slot, delta in enumerate(deltas)}
        self.lora = fast.DeviceLora(self.tables)

    def add(self, y, x, runs):
        """As a step does."""
        self.lora.add_lora(y, x, 0, self.batch(runs, len(x)))

    def batch(self, runs, num_rows):
        """The adapters of a step."""
        short, long = divided(runs)
        work = self.lora.begin(short, num_rows) if short else None
        long_work = make_long_work(self.tables, long) if long else None
        sites = self.lora.sites_of(runs)
        return LoraBatch(runs, self.table, None, self.tables, work, long_work, sites)


@pytest.fixture(scope="module", params=SITES)
def stage(request):
    return Stage(request.param, torch.device("cuda"))


def runs_of(spans):
    runs, begin = [], 0
    for slot, num_rows in spans:
        runs.append(RowRun(slot, 1.0 + 0.25 * slot, begin, begin + num_rows))
        begin += num_rows
    return tuple(runs)


def rows_to_check(runs, num_rows):
    """The first and last row of every run, and some between."""
    edges = {row for run in runs for row in (run.begin, run.end - 1)}
    rng = random.Random(num_rows)
    inner = rng.sample(range(num_rows), min(num_rows, NUM_CHECKED_ROWS))
    return sorted(edges | set(inner))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("spans", STEPS.values(), ids=STEPS)
def test_adapters_of_real_widths_equal_float64(stage, spans, device):
    runs = runs_of(spans)
    num_rows = runs[-1].end + 2  # the last rows are the base's
    generator = torch.Generator(device).manual_seed(num_rows)
    shape = num_rows, stage.num_inputs
    x = torch.randn(shape, generator=generator, device=device).bfloat16()
    shape = num_rows, sum(stage.widths)
    base = torch.randn(shape, generator=generator, device=device).bfloat16()
    ours, plain = base.clone(), base.clone()
    stage.add(ours, x, runs)
    assert ours[-2:].equal(base[-2:])
    assert not ours.isnan().any()

    batch = LoraBatch(runs, stage.table, None, stage.tables)
    portable.add_lora(plain, x, 0, batch)
    rows = rows_to_check(runs, num_rows)
    exact = base[rows].double()
    reference.add_lora(exact, x[rows], 0, batch.select(rows))
    error, other = ((y[rows].double() - exact).abs() for y in (ours, plain))
    assert (exact - base[rows].double()).abs().mean() > 0.05, "the adapters do something"
    assert error.mean() <= 1.1 * other.mean()
    assert (error <= EPS * (exact.abs() + 0.5 * exact.std())).all()


@pytest.mark.timeout(200)
def test_the_rows_of_one_adapter_do_not_depend_on_the_rest_of_the_batch(stage, device):
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(64, stage.num_inputs, generator=generator, device=device).bfloat16()
    y = torch.zeros(64, sum(stage.widths), dtype=torch.bfloat16, device=device)
    alone, alongside = y.clone(), y.clone()
    stage.add(alone, x, (RowRun(1, 1.0, 8, 9),))
    stage.add(alongside, x, (RowRun(0, 1.0, 0, 8), RowRun(1, 1.0, 8, 9), RowRun(3, 1.0, 9, 64)))
    difference = (alone[8].float() - alongside[8].float()).abs()
    assert (difference <= EPS * (alone[8].float().abs() + 0.5 * alone[8].float().std())).all()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 300), (5, 17), (33, 1)],
        [(0, 1), (40, 1), (900, 1), (6000, 1)],
        [(6000, 256), (0, 1), (40, 1), (900, 1)],
    ],
    ids=["prompts", "decode of uneven lengths", "a chunk alongside decodes"],
)
def test_attention_of_real_heads_equals_dense_attention(pieces, window, device):
    """32 query heads of 128 over 8 key heads; one sequence is much longer than the others."""
    shape = HeadShape(32, 8, 128, 128**-0.5, None, window)
    kv, sequences = make_step(shape, torch.bfloat16, device, pieces)
    outputs = run_step(shape, kv, sequences)
    for sequence, found in zip(sequences, outputs, strict=True):
        expected = attention(sequence.q[sequence.start :], sequence.k, sequence.v, shape)
        error = (found.double() - expected).abs()
        limit = 2 * EPS * expected.abs() + 4 * EPS * expected.std()
        assert (error <= limit).all(), sequence.start
