"""Parts of a weight in codes are the parts of what the codes mean."""

import pytest
import torch

from loraplex_services.worker.ops.linear.coded import INTEGERS, CodedWeight

OUTPUTS, INPUTS = 10, 48
COLUMNS = [(0, 16), (16, 48), (4, 12), (5, 40), (40, 48)]


def weight(group_size: int, *, has_zeros: bool, is_ordered: bool, is_int4: bool) -> CodedWeight:
    generator = torch.Generator().manual_seed(group_size)
    num_groups = -(-INPUTS // group_size)
    shape = OUTPUTS, INPUTS
    return CodedWeight(
        "test",
        torch.randint(0, 16, shape, generator=generator).to(torch.uint8 if is_int4 else torch.int8),
        torch.rand(OUTPUTS, num_groups, generator=generator),
        group_size,
        zeros=torch.rand(OUTPUTS, num_groups, generator=generator) if has_zeros else None,
        table=INTEGERS - 8 if is_int4 else None,
        order=None if is_ordered else torch.randperm(INPUTS, generator=generator),
    )


@pytest.mark.parametrize("group_size", [1, 16, 20, INPUTS])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("is_int4", [False, True])
def test_a_part_means_a_part_of_the_weight(group_size, has_zeros, is_ordered, is_int4):
    coded = weight(group_size, has_zeros=has_zeros, is_ordered=is_ordered, is_int4=is_int4)
    wide = coded.dequantised()
    spans = [(1, 3), (7, 10)]
    assert coded.outputs(spans).dequantised().equal(torch.cat((wide[1:3], wide[7:10])))
    for begin, end in COLUMNS:
        assert coded.inputs(begin, end).dequantised().equal(wide[:, begin:end]), (begin, end)


def test_columns_of_complete_groups_keep_their_scales():
    coded = weight(16, has_zeros=True, is_ordered=True, is_int4=True)
    assert [coded.inputs(*span).group_size for span in COLUMNS] == [16, 16, 8, 1, 8]


def test_rows_that_fill_up_a_share_are_zeros():
    coded = weight(16, has_zeros=True, is_ordered=True, is_int4=True)
    wide = coded.outputs([(8, 10)], num_rows=5).dequantised()
    assert wide[:2].equal(coded.dequantised()[8:10])
    assert not wide[2:].any()
