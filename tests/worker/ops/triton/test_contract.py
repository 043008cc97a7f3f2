"""The contract of attention backends, over Triton."""

from __future__ import annotations

import pytest
import torch

from loraplex_services.worker.ops.attention.backend import AttentionMask
from loraplex_services.worker.ops.attention.metadata import StaticInputs
from loraplex_services.worker.ops.attention.triton_backend import (
    TritonAttentionMetadata,
    triton_attention,
)
from tests.worker.ops.attention import contract

# The interpreter is slow: a sample of the combinations.
CASES = contract.cases()[::15]
CASES_IN_CODES = contract.cases()[4:60:19]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_equals_the_reference(case: contract.Case, device: torch.device) -> None:
    contract.check_case(triton_attention(), case, torch.float32, device.type)


@pytest.mark.parametrize(
    ("kept", "dtype"),
    [
        ("int8", torch.float32),
        ("fp8", torch.bfloat16),
        pytest.param("int8", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("fp8", torch.float32, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_cases_in_codes_equal_the_reference(
    kept: str, dtype: torch.dtype, device: torch.device
) -> None:
    maker = triton_attention()
    maker.kv_cache_dtype = kept
    contract.check_codes(maker, dtype, device.type)
    for case in CASES_IN_CODES:
        contract.check_case(maker, case, dtype, device.type)


def test_what_it_cannot_do_is_refused() -> None:
    contract.check_refusals(triton_attention())


def test_metadata_says_what_the_page_says(device: torch.device) -> None:
    contract.check_fields(triton_attention(), device=device.type)


def test_profiling_leaves_the_cache_alone(device: torch.device) -> None:
    contract.check_profiling(triton_attention(), device=device.type)


def test_metadata_of_captured_steps_keeps_the_tensors_it_was_made_with(
    device: torch.device,
) -> None:
    bench = contract.Bench(triton_attention(), (4, 2), device=device.type)
    positions = torch.tensor([3, 0], device=device)
    kv_slots = torch.tensor([2 * 16 + 3, -1], device=device)
    tables = torch.tensor([[2], [0]], dtype=torch.int32, device=device)
    rows = torch.tensor([0, 1], dtype=torch.int32, device=device)
    inputs = StaticInputs((kv_slots,), (tables,), rows, max_keys=64)
    metadata = bench.maker.graph_metadata(bench.kv, positions, inputs)
    assert isinstance(metadata, TritonAttentionMetadata)
    assert metadata.is_cuda_graph and metadata.num_generations == 2
    assert metadata.seq_lens_cuda.tolist() == [1, 1]
    kept = metadata.position_ids, metadata.tables[0], metadata.kv_slots[0], metadata.decode_rows
    q, k, v = bench.random(5)
    outputs = []
    for last in (3, 4):  # the same metadata, replayed one position further
        positions[0], kv_slots[0] = last, 2 * 16 + last
        for plane, values in zip(bench.kv.planes(0), (k, v), strict=True):
            plane[2, :, :last] = values[:last].transpose(0, 1)
        metadata.begin_forward()
        new_q, new_k, new_v = (torch.cat((x[last : last + 1], x[:1])).flatten(1) for x in (q, k, v))
        outputs.append(bench.layer.forward(new_q, new_k, new_v, metadata, AttentionMask.CAUSAL)[0])
    assert kept[0].data_ptr() == positions.data_ptr() and kept[3].data_ptr() == rows.data_ptr()
    for last, found in zip((3, 4), outputs, strict=True):
        expected = contract.attention(
            q[last : last + 1], k[: last + 1], v[: last + 1], bench.shape
        ).flatten()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
