"""Programs against the pass that they were recorded from."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from loraplex_services.worker.native.elementwise import Operation
from loraplex_services.worker.native.program import ProgramMemory
from tests.worker.native.isas import ISAS, native

WIDTH, MAX_ROWS, EPS = 48, 6, 1e-5


@pytest.fixture(autouse=True)
def inference():
    """As steps run."""
    with torch.inference_mode():
        yield


@pytest.fixture(params=ISAS)
def compiled(request):
    return native(request.param)


@pytest.fixture
def compute(compiled):
    """A norm, a product, and the gate of its result: (x, update) -> y."""
    torch.manual_seed(0)
    packed = compiled.pack(torch.randn(2 * WIDTH, WIDTH))
    weight = torch.rand(WIDTH) + 0.5

    def function(x, update):
        normed = compiled.norm(x, update, weight, EPS, False)
        first, second = compiled.linear(normed, packed, 2 * WIDTH).chunk(2, dim=1)
        return compiled.elementwise(Operation.SILU, first, second)

    return function


def drawn(num_rows):
    return torch.randn(num_rows, WIDTH), torch.randn(num_rows, WIDTH)


def recorded(compiled, memory, compute):
    """A program, and its inputs."""
    inputs = drawn(MAX_ROWS)
    program = compiled.record(lambda n: compute(*(value[:n] for value in inputs)), memory)
    assert program is not None
    return program, inputs


def run(program, inputs, values):
    num_rows = len(values[0])
    for ours, new in zip(inputs, values, strict=True):
        ours.fill_(torch.nan)
        ours[:num_rows] = new
    return program.run(num_rows).clone()


def copies(values):
    return [value.clone() for value in values]


def test_a_program_computes_the_same_bits_with_any_number_of_rows(compiled, compute):
    program, inputs = recorded(compiled, ProgramMemory(MAX_ROWS), compute)
    for num_rows in (4, 1, MAX_ROWS, 2, 5, 1):
        values = drawn(num_rows)
        expected = compute(*copies(values))
        program.run(MAX_ROWS).fill_(torch.nan)
        assert run(program, inputs, values).equal(expected)


def test_recording_calls_no_kernel(compiled, compute):
    memory, inputs = ProgramMemory(MAX_ROWS), drawn(MAX_ROWS)
    before = copies(inputs)
    program = compiled.record(lambda n: compute(*(value[:n] for value in inputs)), memory)
    assert program is not None
    assert all(ours.equal(was) for ours, was in zip(inputs, before, strict=True))


def test_programs_share_a_memory(compiled, compute):
    memory = ProgramMemory(MAX_ROWS)
    first, inputs = recorded(compiled, memory, compute)
    num_bytes = memory.num_bytes
    second, others = recorded(compiled, memory, lambda x, update: compute(update, x))
    assert memory.num_bytes == num_bytes
    values = drawn(3)
    assert run(first, inputs, values).equal(compute(*copies(values)))
    assert run(second, others, values).equal(compute(*reversed(copies(values))))


def test_a_deeper_pass_needs_no_more_memory(compiled, compute):
    def deep(depth):
        def function(x, update):
            for _ in range(depth):
                update = compute(compute(x, update), compute(update, x))
            return update

        return function

    memory = ProgramMemory(MAX_ROWS)
    recorded(compiled, memory, deep(1))
    num_bytes = memory.num_bytes
    program, inputs = recorded(compiled, memory, deep(9))
    assert memory.num_bytes <= 2 * num_bytes
    values = drawn(4)
    expected = deep(9)(*copies(values))
    assert run(program, inputs, values).equal(expected)


def test_a_view_keeps_the_memory_of_its_tensor(compiled, compute):
    def function(x, update):
        first = compute(x, update)[:, 8:]
        compute(x, update)
        return compiled.elementwise(Operation.SILU, *first.chunk(2, dim=1))

    program, inputs = recorded(compiled, ProgramMemory(MAX_ROWS), function)
    values = drawn(4)
    expected = function(*copies(values))
    assert run(program, inputs, values).equal(expected)


@pytest.mark.parametrize(
    "in_torch",
    [
        torch.neg,
        lambda x: x.neg_(),
        lambda x: x.add(x, alpha=2),
        lambda x: x.double() * 2,
        lambda x: x.view(len(x), 2, -1, 4).permute(3, 2, 1, 0) * 2,
        lambda x: torch.tensor([1.0]),
    ],
    ids=["function", "in place", "scaled", "wider type", "permuted", "constant"],
)
def test_a_pass_that_computes_in_torch_has_no_program(compiled, compute, in_torch):
    inputs = drawn(MAX_ROWS)
    program = compiled.record(
        lambda n: in_torch(compute(*(value[:n] for value in inputs))), ProgramMemory(MAX_ROWS)
    )
    assert program is None


@pytest.mark.parametrize(
    "irregular",
    [
        lambda compute, x, update: compute(x[1:], update[1:]),
        lambda compute, x, update: compute(compute(x, update), update) if len(x) > 4 else x,
        lambda compute, x, update: compute(x[: len(x) // 4 + 1], update[: len(x) // 4 + 1]),
        lambda compute, x, update: compute(x, torch.empty(WIDTH, dtype=x.dtype).expand(len(x), -1)),
    ],
    ids=["all but one row", "more calls", "a part of the rows", "a tensor of another size"],
)
def test_calls_that_are_not_proportional_to_the_rows_have_no_program(compiled, compute, irregular):
    inputs = drawn(MAX_ROWS)
    memory = ProgramMemory(MAX_ROWS)
    program = compiled.record(
        lambda n: irregular(compute, *(value[:n] for value in inputs)), memory
    )
    assert program is None


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "in_torch",
    [
        lambda x, z: x + z,
        lambda x, z: x * 0.3,
        lambda x, z: x.mul_(z[:, :1]),
        lambda x, z: x.add_(z[0]),
        lambda x, z: torch.cat((x[:, 5:], z, x[:, :5]), dim=-1),
        lambda x, z: x.view(len(x), -1, 2, 4)[:, :, 1].flatten(1) + 1,
        lambda x, z: x.view(len(x), -1, 2)[:, :, :1].flatten(1).contiguous(),
        lambda x, z: (x.float() * z).to(z.dtype),
        lambda x, z: z.view(len(z), 3, -1)[:, 1] * x[:, :16],
    ],
    ids=[
        "sum",
        "number",
        "repeated along a row",
        "repeated in rows",
        "joined",
        "heads",
        "columns",
        "wider type",
        "parts",
    ],
)
def test_sums_products_and_copies_have_the_bits_of_torch(compiled, in_torch, dtype, num_rows):
    def as_dtype(num_rows):
        return [(9 * value).to(dtype) for value in drawn(num_rows)]

    inputs = as_dtype(MAX_ROWS)
    program = compiled.record(
        lambda n: in_torch(*(value[:n] for value in inputs)), ProgramMemory(MAX_ROWS)
    )
    assert program is not None
    values = as_dtype(num_rows)
    expected = in_torch(*copies(values))
    ours = run(program, inputs, values)
    assert ours.dtype is expected.dtype and ours.equal(expected)


def test_views_are_no_computation(compiled, compute):
    inputs = torch.cat(drawn(MAX_ROWS), dim=1)

    def function(num_rows):
        x, update = inputs[:num_rows].split(WIDTH, dim=1)
        return compute(x.view(num_rows, WIDTH), update[:, :]).view(num_rows, 2, -1)

    program = compiled.record(function, ProgramMemory(MAX_ROWS))
    assert program is not None
    assert program.run(3).shape == (3, 2, WIDTH // 2)


def test_a_kernel_that_programs_cannot_call_prevents_one(compiled):
    scores, limits = torch.randn(MAX_ROWS, WIDTH), torch.zeros(MAX_ROWS, 3)

    def compute(num_rows):
        compiled.call("truncate", scores, WIDTH, limits, num_rows)
        return scores[:num_rows]

    assert compiled.record(compute, ProgramMemory(MAX_ROWS)) is None


def test_calls_of_other_threads_are_not_recorded(compiled, compute):
    memory, others = ProgramMemory(MAX_ROWS), drawn(5)
    with ThreadPoolExecutor(1) as pool:

        def while_another_computes(x, update):
            pool.submit(compute, *others).result()
            return compute(x, update)

        program, inputs = recorded(compiled, memory, while_another_computes)
    values = drawn(4)
    expected = compute(*copies(values))
    before = [other.clone() for other in others]
    assert run(program, inputs, values).equal(expected)
    assert all(other.equal(was) for other, was in zip(others, before, strict=True))


def test_a_recording_that_fails_leaves_the_library_as_it_was(compiled, compute):

    def fail(num_rows):
        raise ValueError("no result")

    with pytest.raises(ValueError, match="no result"):
        compiled.record(fail, ProgramMemory(MAX_ROWS))
    values = drawn(4)
    expected = compute(*copies(values))
    assert compute(*values).equal(expected)


def test_recording_imports_no_compiler():
    code = (
        "import sys, torch; from loraplex_services.worker.native.program import *\n"
        "with Recorder(None, memory := ProgramMemory(1)):\n"
        "    memory.begin(1); torch.empty(1, dtype=torch.float32).view(1, 1)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
