"""Whole models over the kernels against the same models in plain torch, adapters of several ranks.

The same tokens go through every model, so that logprobs can be compared position by position.
Float32 has to agree to rounding. Half precision is judged by what it loses: the errors of the
kernels against torch in float32 may be no larger than those of torch itself in half precision.
"""

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.llama import ALL_SEVEN, ATTENTION, Shape, write_adapter, write_base_config
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan, batch_order
from tests.worker.loading import HOST_CACHE_BYTES, load_adapter
from tests.worker.ops.triton.conftest import INTERPRETING

DECODE_STEPS = 3
MAX_FLOAT32_ERROR = 1e-4
TRUNCATION = 2.5 if INTERPRETING else 1.0
"""The interpreter truncates what it casts to bfloat16, where a GPU rounds: half the values differ,
and errors are more than twice as large."""
MAX_MEAN_RATIO, MAX_TAIL_RATIO = 1.1 * TRUNCATION, 1.25 * TRUNCATION
MAX_ROW_RATIO = 2.5 * TRUNCATION
"""One row's mean error against the mean of all rows: an adapter that is wrong for a single row
disappears in the mean of the others."""


@dataclass(frozen=True)
class Geometry:
    """A base, its adapters and the prompts that run through it."""

    shape: Shape
    ranks: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    """Of the first step: one for each adapter, then one for the base."""
    later_lens: tuple[int, ...]
    """Prompts that come while the first ones decode, with the last adapters."""
    arena_bytes: int


GEOMETRIES = {
    "small": Geometry(
        Shape("small", 96, 64, 80, 2, 4, 2), (3, 17), (21, 1, 4), (18,), arena_bytes=4 << 20
    ),
    "llama-3-8b": Geometry(
        Shape("llama-3-8b", 256, 4096, 14336, 2, 32, 8),
        (8, 16, 64, 256),
        (300, 17, 130, 2, 41),
        (300, 5),
        arena_bytes=1 << 30,
    ),
}
on_gpu = pytest.mark.skipif(INTERPRETING, reason="takes hours under the interpreter")


def params(*dtypes):
    return [
        pytest.param(name, dtype, id=f"{name}-{dtype}", marks=[on_gpu] * (name != "small"))
        for name in GEOMETRIES
        for dtype in dtypes
    ]


def write_weights(shape, folder):
    """Random bfloat16 weights, which float32 holds exactly: signals keep their size."""
    generator = torch.Generator().manual_seed(0)

    def random(rows, columns, scale):
        values = torch.randn(rows, columns, generator=generator) * scale
        return values.to(torch.bfloat16)

    hidden = shape.hidden_size
    tensors = {
        "model.embed_tokens.weight": random(shape.vocab_size, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": random(shape.vocab_size, hidden, 2 * hidden**-0.5),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, (num_inputs, num_outputs) in shape.linears.items():
            block = "self_attn" if name in ATTENTION else "mlp"
            weight = random(num_outputs, num_inputs, num_inputs**-0.5)
            tensors[f"{prefix}.{block}.{name}.weight"] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class Folders:
    """Bases and adapters on disk, written when they are first asked for."""

    def __init__(self, root):
        self._root = root
        self._known = {}

    def of(self, name):
        """(base, adapters) of a geometry."""
        if name not in self._known:
            geometry, root = GEOMETRIES[name], self._root / name
            base = write_base_config(geometry.shape, root / "base", 1024)
            write_weights(geometry.shape, base)
            adapters = [
                write_adapter(
                    geometry.shape,
                    root / f"r{rank}",
                    rank,
                    torch.bfloat16,
                    seed=rank,
                    targets=ALL_SEVEN if i % 2 else ATTENTION,
                )
                for i, rank in enumerate(geometry.ranks)
            ]
            self._known[name] = base, adapters
        return self._known[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("models"))


def tokens_of(seed, count, vocab_size):
    return [(seed * 131 + 17 * i) % vocab_size for i in range(count)]


class Forced:
    """A runner whose requests continue with tokens that are chosen beforehand."""

    def __init__(self, geometry, base, adapters, device, dtype, backend, quantization="none"):
        self._vocab_size = geometry.shape.vocab_size
        self._runner = build_runner(
            base,
            device=device.type,
            dtype=dtype,
            arena_bytes=geometry.arena_bytes,
            host_cache_bytes=HOST_CACHE_BYTES,
            max_resident=8,
            max_lora_rank=256,
            max_num_batched_tokens=1024,
            attention_backend=backend,
            quantization=quantization,
        )
        self._runner.arena.data.fill_(0xFF)  # NaN wherever nothing is written
        self._free = list(range(self._runner.arena_blocks))
        for slot, folder in enumerate(adapters):
            load_adapter(self._runner, slot, folder, self._blocks)
        self._requests = []

    def _blocks(self, count):
        """Scattered: from both ends of what is free in alternation."""
        return [self._free.pop(-(i % 2)) for i in range(count)]

    def add(self, number, num_tokens, slots, keeps_kv=True):
        """A request that begins with the next step."""
        every = self._vocab_size
        sampling = SamplingParams(max_tokens=64, seed=number, logprobs=every, prompt_logprobs=every)
        prompt = tokens_of(number, num_tokens, self._vocab_size)
        request = Request(f"r{number}", prompt, sampling)
        num_blocks = -(-(num_tokens + DECODE_STEPS + 2) // self._runner.tokens_per_block)
        if keeps_kv:
            request.block_tables = [self._blocks(num_blocks) for _ in self._runner.kv_group_windows]
        self._requests.append((request, slots))

    def step(self):
        """Compute all that is pending; logprobs `[positions, vocabulary]`, by request."""
        rows = [
            PlannedRow(request, request.num_computed, request.num_pending, True, slots)
            for request, slots in self._requests
        ]
        rows.sort(key=batch_order)
        found = {}
        for row, sampled in zip(
            rows, self._runner.launch(StepPlan(0, tuple(rows))).result(), strict=True
        ):
            entries = [*sampled.prompt_logprobs.scored(), sampled.logprobs]
            table = torch.tensor([[value for _, value in sorted(entry.top)] for entry in entries])
            assert table.shape == (row.num_tokens, self._vocab_size)
            found[row.request.request_id] = table
            row.request.num_computed += row.num_tokens
            end = row.request.num_tokens
            row.request.output_ids.append(tokens_of(end, 1, self._vocab_size)[0])
        return found


def all_steps(name, folders, device, dtype, backend, quantization="none"):
    """Prompts of all adapters at once, then a mixed step, then pure decodes."""
    geometry, num_adapters = GEOMETRIES[name], len(GEOMETRIES[name].ranks)
    base, adapters = folders.of(name)
    runner = Forced(geometry, base, adapters, device, dtype, backend, quantization)
    slots = [((slot, 0.5 + 0.5 * slot),) for slot in range(num_adapters)]
    for number, num_tokens in enumerate(geometry.prompt_lens):
        runner.add(number, num_tokens, slots[number] if number < num_adapters else ())
    steps = [runner.step()]
    for i, num_tokens in enumerate(geometry.later_lens):
        runner.add(100 + i, num_tokens, slots[num_adapters - 1 - i])
    return steps + [runner.step() for _ in range(1 + DECODE_STEPS)]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "dtype"), params("float32"))
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
def test_float32_equals_plain_torch(name, dtype, quantization, folders, device):
    ours = all_steps(name, folders, device, dtype, "triton", quantization)
    expected = all_steps(name, folders, device, dtype, "vanilla", quantization)
    for step, other in zip(ours, expected, strict=True):
        assert step.keys() == other.keys()
        for request, logprobs in step.items():
            error = (logprobs - other[request]).abs().max()
            assert error < MAX_FLOAT32_ERROR, request


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "dtype"), params("bfloat16"))
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
def test_half_precision_loses_no_more_than_plain_torch_does(
    name, dtype, quantization, folders, device
):
    check_half_precision(name, dtype, "triton", quantization, folders, device)


@on_gpu
@pytest.mark.long
@pytest.mark.timeout(300)
def test_flashinfer_loses_no_more_than_plain_torch_does(folders, device):
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    check_half_precision("llama-3-8b", "bfloat16", "flashinfer", "none", folders, device)


def check_half_precision(name, dtype, attention_backend, quantization, folders, device):
    exact = all_steps(name, folders, device, "float32", "vanilla", quantization)
    plain, ours = (
        errors(all_steps(name, folders, device, dtype, backend, quantization), exact)
        for backend in ("vanilla", attention_backend)
    )
    means = {request: rows.mean(1) for request, rows in plain.items()}
    limit = torch.cat(list(means.values())).mean() * MAX_ROW_RATIO
    for request, rows in ours.items():
        worst = torch.maximum(limit, MAX_ROW_RATIO * means[request])
        assert (rows.mean(1) <= worst).all(), request
    theirs, found = (torch.cat(list(e.values())).flatten() for e in (plain, ours))
    ratios = found.mean() / theirs.mean(), tail(found) / tail(theirs)
    print(f"{name}: mean {ratios[0]:.2f}x, 99th percentile {ratios[1]:.2f}x of plain torch's error")
    assert theirs.mean() > 1e-4
    assert ratios[0] <= MAX_MEAN_RATIO
    assert ratios[1] <= MAX_TAIL_RATIO


def tail(values):
    """The 99th percentile; `quantile` takes fewer values than there are."""
    return values.sort().values[int(0.99 * len(values))]


def errors(steps, exact):
    """Absolute errors `[positions, vocabulary]` of every request over all steps."""
    found = {}
    for step, other in zip(steps, exact, strict=True):
        for request, logprobs in step.items():
            assert logprobs.isfinite().all(), request
            found.setdefault(request, []).append((logprobs - other[request]).abs())
    return {request: torch.cat(parts) for request, parts in found.items()}


def test_every_adapter_changes_the_output_of_its_request(folders, device):
    base, adapters = folders.of("small")
    geometry = GEOMETRIES["small"]
    runner = Forced(geometry, base, adapters, device, "float32", "triton")
    for number, slots in enumerate(((), ((0, 1.0),), ((1, 1.0),))):
        runner.add(7, 5, slots)
        runner._requests[-1][0].request_id = f"r{number}"
    plain, first, second = runner.step().values()
    assert (first - plain).abs().max() > 0.05
    assert (second - plain).abs().max() > 0.05
    assert (second - first).abs().max() > 0.05


def test_a_step_without_the_cache_gives_what_one_with_it_gives(folders, device):
    base, adapters = folders.of("small")
    steps = []
    for keeps_kv in (True, False):
        runner = Forced(GEOMETRIES["small"], base, adapters, device, "float32", "triton")
        for number, num_tokens in enumerate((21, 1, 4)):
            runner.add(number, num_tokens, ((0, 1.0),) if number else (), keeps_kv)
        steps.append(runner.step())
    for request, logprobs in steps[0].items():
        assert (logprobs - steps[1][request]).abs().max() < MAX_FLOAT32_ERROR, request
