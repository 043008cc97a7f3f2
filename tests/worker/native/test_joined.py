"""Products on AMX that are joined with what follows them: the best output of a head, and gates."""

import pytest
import torch

from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.native.elementwise import Operation
from loraplex_services.worker.native.isa import AMX, host_isas
from loraplex_services.worker.ops.linear.cpu import GATES, GateLinear, PlainLinear
from tests.worker.native.isas import native

INF = float("inf")
if AMX not in host_isas():
    pytest.skip("this processor lacks AMX", allow_module_level=True)


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def amx(request):
    library = native(AMX)
    library.set_threads(request.param)
    return library


def random_rows(num_rows, num_inputs):
    return torch.randn(num_rows, num_inputs).bfloat16()


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 32, 33, 600])
@pytest.mark.parametrize("shape", [(1, 32), (33, 96), (200, 64), (70, 4224)], ids=str)
def test_a_plain_weight_gives_the_bits_of_a_weight_in_tiles(amx, shape, num_rows):
    torch.manual_seed(0)
    weight, x = random_rows(*shape), random_rows(num_rows, shape[1])
    head = PlainLinear(amx, weight)
    expected = amx.linear_tiles(x, amx.pack_tiles(weight), shape[0])
    assert head.apply(x).equal(expected)
    assert head.apply_float32(x).equal(expected.float())
    assert head.best(x).tolist() == expected.float().numpy().argmax(axis=-1).tolist()


def test_the_lowest_of_equally_good_outputs_is_the_best(amx):
    torch.manual_seed(1)
    weight, x = random_rows(5000, 64), random_rows(40, 64)
    weight[2500:] = weight[:2500]
    x[7] = 0.0
    found = PlainLinear(amx, weight).best(x)
    assert found.max() < 2500
    assert found[7] == 0
    assert found.tolist() == (x.float() @ weight.float().T).bfloat16().argmax(-1).tolist()


def test_the_lowest_is_the_best_whichever_thread_finds_it(amx):
    """Threads help each other, so one may find the later of two equals first: here the last output
    of the first thread's share, and one of the second's."""
    weight = torch.zeros(5000, 64).bfloat16()
    weight[2495] = weight[4000] = 1.0
    head, x = PlainLinear(amx, weight), torch.ones(1, 64).bfloat16()
    assert {int(head.best(x)) for _ in range(300)} == {2495}


def test_nan_is_better_than_numbers_as_where_all_logits_are_stored(amx):
    weight = torch.zeros(5000, 32).bfloat16()
    weight[:70, 0] = 1.0
    x = torch.ones(3, 32).bfloat16()
    x[[0, 2], 0] = INF
    head = PlainLinear(amx, weight)
    assert head.apply_float32(x).numpy().argmax(axis=-1).tolist() == [70, 0, 70]
    assert head.best(x).tolist() == [70, 0, 70]


def test_the_best_is_that_of_rounded_outputs(amx):
    """Both outputs are 1 in bfloat16, and the second is larger before it is rounded."""
    weight = torch.zeros(2, 32).bfloat16()
    weight[:, 0] = 1.0
    weight[1, 1] = 2**-10
    assert PlainLinear(amx, weight).best(torch.ones(1, 32).bfloat16()).tolist() == [0]


def test_the_first_is_the_best_where_nothing_is_above_minus_infinity(amx):
    x = torch.ones(2, 32).bfloat16()
    x[1] = float("nan")
    assert PlainLinear(amx, torch.full((50, 32), -INF).bfloat16()).best(x).tolist() == [0, 0]


@pytest.mark.parametrize("operation", sorted(GATES))
@pytest.mark.parametrize("num_rows", [1, 3, 16, 32, 33, 600])
@pytest.mark.parametrize("shape", [(32, 1), (96, 100), (192, 1056)], ids=str)
def test_joined_gates_have_the_bits_of_separate_ones(amx, shape, num_rows, operation):
    torch.manual_seed(2)
    weight = random_rows(*shape)
    x = torch.full((num_rows, shape[1] + 3), float("nan")).bfloat16()[:, : shape[1]]
    x.copy_(random_rows(num_rows, shape[1]) / 4)
    expected = amx.linear_tiles(x, amx.pack_tiles(weight), shape[0])
    joined = GateLinear(amx, weight, operation)
    assert joined.apply(x).equal(expected)
    gates, others = expected.chunk(2, dim=1)
    assert joined.gated(x).equal(amx.elementwise(operation, gates, others))


def test_rows_of_gates_come_back(amx):
    weight = random_rows(192, 70)
    joined = GateLinear(amx, weight, Operation.SILU)
    for begin, end in ((0, 192), (5, 6), (7, 7), (90, 101), (96, 192), (100, 171)):
        assert joined.weight_rows(begin, end).equal(weight[begin:end].float())


@pytest.mark.parametrize(
    ("activation", "num_outputs", "is_joined"),
    [("silu", 64, True), ("gelu_pytorch_tanh", 64, True), ("relu", 64, False), ("silu", 48, False)],
)
def test_what_no_kernel_joins_stays_two_operators(amx, activation, num_outputs, is_joined):
    weight = random_rows(num_outputs, 32)
    made = NativeOperators(amx, torch.bfloat16).linear(weight, activation)
    assert isinstance(made, GateLinear) == is_joined
    assert not isinstance(NativeOperators(amx, torch.float32).linear(weight), GateLinear)


def test_heads_that_the_kernel_cannot_read_are_packed(amx):
    operators = NativeOperators(amx, torch.bfloat16)
    assert isinstance(operators.head(random_rows(7, 64)), PlainLinear)
    assert not isinstance(operators.head(random_rows(7, 40)), PlainLinear)
