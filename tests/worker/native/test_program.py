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


def recorded(compiled, memory, num_rows, compute):
    """A program over the inputs that come with it."""
    inputs = drawn(num_rows)
    memory.begin(num_rows)
    result, program = compiled.record(lambda: compute(*inputs), memory)
    assert program is not None
    assert program.result.data_ptr() == result.data_ptr()
    return program, inputs


def run(program, inputs, values):
    for ours, new in zip(inputs, values, strict=True):
        ours.copy_(new)
    program.run()
    return program.result.clone()


def test_a_program_computes_the_same_bits_from_new_inputs(compiled, compute):
    program, inputs = recorded(compiled, ProgramMemory(MAX_ROWS), 4, compute)
    for _ in range(3):
        values = drawn(4)
        expected = compute(*(value.clone() for value in values))
        program.result.fill_(torch.nan)
        assert run(program, inputs, values).equal(expected)


def test_programs_of_all_sizes_share_a_memory(compiled, compute):
    memory = ProgramMemory(MAX_ROWS)
    programs = {2: recorded(compiled, memory, 2, compute)}
    num_bytes = memory.num_bytes
    programs |= {n: recorded(compiled, memory, n, compute) for n in (1, 6, 3)}
    assert memory.num_bytes == num_bytes
    for num_rows in (6, 1, 2, 3):
        values = drawn(num_rows)
        expected = compute(*(value.clone() for value in values))
        program, inputs = programs[num_rows]
        assert run(program, inputs, values).equal(expected)


def test_a_deeper_pass_needs_no_more_memory(compiled, compute):
    def deep(depth):
        def function(x, update):
            for _ in range(depth):
                update = compute(compute(x, update), compute(update, x))
            return update

        return function

    memory = ProgramMemory(MAX_ROWS)
    recorded(compiled, memory, 4, deep(1))
    num_bytes = memory.num_bytes
    program, inputs = recorded(compiled, memory, 4, deep(9))
    assert memory.num_bytes <= 2 * num_bytes
    values = drawn(4)
    expected = deep(9)(*(value.clone() for value in values))
    assert run(program, inputs, values).equal(expected)


def test_a_view_keeps_the_memory_of_its_tensor(compiled, compute):
    def function(x, update):
        first = compute(x, update)[:2]
        compute(x, update)
        return compiled.elementwise(Operation.SILU, *first.chunk(2, dim=1))

    program, inputs = recorded(compiled, ProgramMemory(MAX_ROWS), 4, function)
    values = drawn(4)
    expected = function(*(value.clone() for value in values))
    assert run(program, inputs, values).equal(expected)


@pytest.mark.parametrize(
    "in_torch",
    [
        torch.neg,
        lambda x: x.neg_(),
        lambda x: x.add(x, alpha=2),
        lambda x: x.double() * 2,
        lambda x: x.view(2, 2, -1, 4).permute(3, 2, 1, 0) * 2,
        lambda x: torch.tensor([1.0]),
    ],
    ids=["function", "in place", "scaled", "wider type", "permuted", "constant"],
)
def test_a_pass_that_computes_in_torch_has_no_program(compiled, compute, in_torch):
    memory, values = ProgramMemory(MAX_ROWS), drawn(4)
    memory.begin(4)
    expected = in_torch(compute(*(value.clone() for value in values)))
    result, program = compiled.record(lambda: in_torch(compute(*values)), memory)
    assert program is None
    assert result.equal(expected)


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
def test_sums_products_and_copies_have_the_bits_of_torch(compiled, in_torch, dtype):
    def as_dtype():
        return [(9 * value).to(dtype) for value in drawn(4)]

    memory, inputs = ProgramMemory(MAX_ROWS), as_dtype()
    memory.begin(4)
    _, program = compiled.record(lambda: in_torch(*inputs), memory)
    assert program is not None
    values = as_dtype()
    expected = in_torch(*(value.clone() for value in values))
    ours = run(program, inputs, values)
    assert ours.dtype is expected.dtype and ours.equal(expected)


def test_views_are_no_computation(compiled, compute):
    memory = ProgramMemory(MAX_ROWS)
    memory.begin(4)
    x, update = torch.cat(drawn(4), dim=1).split(WIDTH, dim=1)
    result, program = compiled.record(
        lambda: compute(x.view(4, WIDTH), update[:, :]).view(2, -1), memory
    )
    assert program is not None
    assert result.shape == (2, 2 * WIDTH)


def test_a_kernel_that_programs_cannot_call_prevents_one(compiled):
    memory, scores = ProgramMemory(MAX_ROWS), torch.randn(2, WIDTH)
    limits = torch.tensor([[0.0, 1.0, 0.0]] * 2)
    memory.begin(2)

    def compute():
        compiled.call("truncate", scores, WIDTH, limits, 2)
        return scores

    assert compiled.record(compute, memory)[1] is None


def test_calls_of_other_threads_are_not_recorded(compiled, compute):
    memory, others = ProgramMemory(MAX_ROWS), drawn(5)
    with ThreadPoolExecutor(1) as pool:

        def while_another_computes(x, update):
            pool.submit(compute, *others).result()
            return compute(x, update)

        program, inputs = recorded(compiled, memory, 4, while_another_computes)
    values = drawn(4)
    expected = compute(*(value.clone() for value in values))
    before = [other.clone() for other in others]
    assert run(program, inputs, values).equal(expected)
    assert all(other.equal(was) for other, was in zip(others, before, strict=True))


def test_a_recording_that_fails_leaves_the_library_as_it_was(compiled, compute):
    memory = ProgramMemory(MAX_ROWS)
    memory.begin(4)

    def fail():
        raise ValueError("no result")

    with pytest.raises(ValueError, match="no result"):
        compiled.record(fail, memory)
    values = drawn(4)
    expected = compute(*(value.clone() for value in values))
    assert compute(*values).equal(expected)


def test_recording_imports_no_compiler():
    code = (
        "import sys, torch; from loraplex_services.worker.native.program import *\n"
        "with Recorder(None, memory := ProgramMemory(1)):\n"
        "    memory.begin(1); torch.empty(1, dtype=torch.float32).view(1, 1)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
