"""From one float type to another: torch is the truth."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import InvalidAdapter
from loraplex_services.worker.adapters.device.base_values import TORCH_DTYPES, tensor_of, values_of
from loraplex_services.worker.adapters.pack.values import Values, check_finite

PAIRS = [(source, target) for source in TORCH_DTYPES for target in TORCH_DTYPES]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_conversions_give_the_bits_that_torch_gives(source, target, bits):
    wide = torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())
    tensor = wide[wide.isfinite()].to(TORCH_DTYPES[source])
    tensor = tensor[tensor.isfinite()]
    converted = values_of(tensor).to(target)
    wanted = tensor.to(TORCH_DTYPES[target])
    assert tensor_of(converted).equal(wanted)
    assert converted.all_finite() == bool(wanted.isfinite().all())


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_no_number_is_found(dtype, bad):
    tensor = torch.randn(5, 7).to(TORCH_DTYPES[dtype])
    assert values_of(tensor).all_finite()
    tensor[3, 2] = bad
    with pytest.raises(InvalidAdapter, match="NaN"):
        check_finite(values_of(tensor), "some.weight")


def test_the_bits_of_bfloat16_survive_both_ways():
    values = Values(np.arange(2**16, dtype=np.uint16), "BF16")
    assert (values_of(tensor_of(values)).data == values.data).all()
