"""The contract of attention backends, over FlashInfer: with the library on a GPU where it is
installed, and with a stand-in under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.ops.attention.backend import AttentionMaker, QuantConfig
from loraplex_services.worker.ops.attention.flashinfer import (
    FlashInferAttention,
    FlashInferMetadata,
    flashinfer_attention,
)
from loraplex_services.worker.ops.attention.metadata import StaticInputs
from tests.worker.ops.attention import contract
from tests.worker.ops.attention.flashinfer_stand_in import StandIn
from tests.worker.ops.triton.conftest import INTERPRETING

# The interpreter is slow: a sample of the combinations, and all on a GPU.
CASES = contract.cases()[:: 7 if INTERPRETING else 1]
HEAD_DIM = 64


@pytest.fixture(scope="module")
def maker() -> AttentionMaker:
    if INTERPRETING:
        return flashinfer_attention(StandIn, torch.device("cpu"))
    library = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    wrapper_class = library.BatchPrefillWithPagedKVCacheWrapper
    return flashinfer_attention(wrapper_class, torch.device("cuda"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_equals_the_reference(
    maker: AttentionMaker, case: contract.Case, device: torch.device
) -> None:
    contract.check_case(maker, case, torch.bfloat16, device.type, HEAD_DIM)


def test_what_it_cannot_do_is_refused(maker: AttentionMaker) -> None:
    contract.check_refusals(maker, HEAD_DIM)


def test_profiling_leaves_the_cache_alone(maker: AttentionMaker, device: torch.device) -> None:
    contract.check_profiling(maker, torch.bfloat16, device.type, HEAD_DIM)


def test_metadata_says_what_the_page_says(maker: AttentionMaker, device: torch.device) -> None:
    contract.check_fields(maker, HEAD_DIM, device.type)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_behind_a_window_are_not_read(
    maker: AttentionMaker, device: torch.device, softcap: float | None
) -> None:
    bench = contract.Bench(maker, (4, 2), 5, HEAD_DIM, torch.bfloat16, device.type)
    bench.config.attention_softcap = softcap
    bench.layer = maker.layer(bench.config, 0, rotated=True)
    q, k, v = (x.flatten(1) for x in bench.random(39))
    bench.layer.forward(q[:36].clone(), k[:36], v[:36], bench.metadata([36], [0], [[3, 1, 2]]))
    bench.arena.data[3] = 0xFF
    with contract.poisoned_outputs():
        metadata = bench.metadata([2], [36], [[-1, 1, 2]])
        chunk = bench.layer.forward(q[36:38].clone(), k[36:38], v[36:38], metadata)
        bench.arena.data[1] = 0xFF
        metadata = bench.metadata([1], [38], [[-1, -1, 2]])
        last = bench.layer.forward(q[38:].clone(), k[38:], v[38:], metadata)
    heads = (-1, HEAD_DIM)
    q, k, v = (x.unflatten(1, heads) for x in (q, k, v))
    expected = contract.attention(q[36:], k, v, bench.layer.shape).flatten(1)
    found = torch.cat((chunk, last)).double()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("head_dim", "others", "error", "why"),
    [
        (96, {}, Unsupported, "layer 3 has head_dim 96.*64, 128, 256; use triton"),
        (64, {"sinks": torch.zeros(4)}, Unsupported, "layer 3 has attention sinks.*use triton"),
        (64, {"window": 8, "is_chunked": True}, Unsupported, "vanilla"),
        (64, {"quant_config": QuantConfig("int8")}, InvalidRequest, "kv_cache_dtype"),
    ],
)
def test_what_flashinfer_has_no_kernels_for_is_refused_with_the_way_out(
    head_dim: int, others: dict[str, object], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        if others.get("is_chunked"):
            shape = contract.HeadShape(4, 4, head_dim, 1.0, None, 8, is_chunked=True)
            FlashInferAttention.for_heads(3, shape)
        FlashInferAttention(3, 4, head_dim, **others)


def test_layers_of_one_kind_share_the_plan_of_a_step(
    maker: AttentionMaker, device: torch.device
) -> None:
    bench = contract.Bench(maker, (4, 2), None, HEAD_DIM, torch.bfloat16, device.type)
    kind = (0, bench.layer.shape, False)
    plans = []
    for _ in range(2):
        metadata = bench.metadata([3], [0], [[4]])
        assert isinstance(metadata, FlashInferMetadata)
        wrapper = metadata.wrapper(kind, torch.bfloat16)
        assert metadata.wrapper(kind, torch.bfloat16) is wrapper
        plans.append(wrapper.num_plans if isinstance(wrapper, StandIn) else len(plans))
    assert plans[1] == plans[0] + 1


def test_steps_are_not_captured(maker: AttentionMaker, device: torch.device) -> None:
    bench = contract.Bench(maker, (4, 2), None, HEAD_DIM, torch.bfloat16, device.type)
    assert not maker.backend.captures_graphs
    empty = torch.zeros(1, dtype=torch.int32, device=device)
    inputs = StaticInputs((empty.long(),), (empty[None],), empty, max_keys=16)
    with pytest.raises(Unsupported, match="is_cuda_graph"):
        bench.maker.graph_metadata(bench.kv, empty.long(), inputs)
