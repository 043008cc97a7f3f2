"""Grouped products of experts under Triton's interpreter (or on a GPU) against plain torch."""

import itertools
import json
import random

import pytest
import torch

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.grouped_experts import GroupedExperts
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.moe import Expert, ExpertWeights, LoopedExperts
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.ops.activation.torch import clamped_gate
from loraplex_services.worker.ops.linear.torch import DenseLinear
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.device_records import OutputRange
from loraplex_services.worker.ops.lora.device_tables import DeviceTables, SiteShape
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.moe import reference
from loraplex_services.worker.ops.moe import triton as moe
from loraplex_services.worker.ops.moe.pairs import sort_pairs
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.cuda_graphs import forward_static
from loraplex_services.worker.runner.graph_inputs import DECODE
from loraplex_services.worker.types.model_config import ClampedSwiglu
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.worker.loading import HOST_CACHE_BYTES
from tests.worker.ops.lora.entering import enter_deltas
from tests.worker.ops.triton.adapters import TOLERANCE, PackedArena, random_delta
from tests.worker.ops.triton.conftest import INTERPRETING
from tests.worker.ops.triton.reads import note_reads
from tests.worker.ops.triton.test_runner import AsksNobody
from tests.worker.tiny import CONFIG

SMALL = moe.GroupedTiling(16, 32, 16, 4, 2, 2)
PROMPTS = [[5, 6, 7, 8, 9], [11] * 9, [3, 2]]
MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
}


def random_choices(num_tokens, num_experts, num_active, generator):
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    return scores.topk(num_active, dim=-1).indices


@pytest.mark.parametrize("num_experts", [2, 5, 130])
def test_pairs_are_sorted_by_expert_then_token(device, num_experts):
    chosen = random_choices(23, num_experts, 2, torch.Generator().manual_seed(0)).to(device)
    pairs = sort_pairs(chosen, num_experts)
    keys = [(int(chosen.flatten()[p]), p) for p in pairs.order.tolist()]
    assert keys == sorted(keys)
    counts = torch.bincount(chosen.flatten().cpu(), minlength=num_experts)
    assert pairs.ends.tolist() == counts.cumsum(0).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_active", "num_inputs", "num_outputs"),
    [
        (1, 3, 1, 8, 1),
        (19, 4, 2, 40, 33),
        pytest.param(40, 7, 3, 33, 70, marks=pytest.mark.long),
        (6, 130, 4, 16, 16),
    ],
)
def test_each_pair_is_multiplied_by_its_experts_weight(
    device, dtype, num_tokens, num_experts, num_active, num_inputs, num_outputs
):
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = random_choices(num_tokens, num_experts, num_active, generator).to(device)
    chosen[num_tokens // 2 :] = chosen[
        0
    ].clone()  # one expert has many blocks, others may have none
    weights = torch.randn(num_experts, num_outputs, num_inputs, generator=generator) / 4
    x = torch.randn(num_tokens, num_inputs, generator=generator)
    weights, x = weights.to(device, dtype), x.to(device, dtype)
    back = torch.randn(num_experts, num_inputs, num_outputs, generator=generator) / 4
    back = back.to(device, dtype)
    pairs = sort_pairs(chosen, num_experts)
    y = moe.grouped_linear(x, weights, pairs, SMALL, of_tokens=True)
    experts = chosen.flatten()
    expected = reference.grouped_linear(x.repeat_interleave(num_active, 0), weights, experts)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(y.double(), expected[pairs.order], **tolerance)
    z = moe.grouped_linear(y, back, pairs, SMALL, of_tokens=False)
    in_order = reference.grouped_linear(y, back, experts[pairs.order])
    torch.testing.assert_close(z[pairs.order].double(), in_order, **tolerance)


@pytest.mark.skipif(INTERPRETING, reason="real widths take the interpreter minutes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 64, 300, 2000])
def test_every_tiling_multiplies_real_widths(device, dtype, num_tokens):
    num_experts, num_active, hidden, width = 32, 4, 2048, 768
    generator = torch.Generator().manual_seed(0)
    chosen = random_choices(num_tokens, num_experts, num_active, generator).to(device)
    x = torch.randn(num_tokens, hidden, generator=generator).to(device, dtype)
    up = torch.randn(num_experts, width, hidden, generator=generator).to(device, dtype)
    back = torch.randn(num_experts, hidden, width, generator=generator).to(device, dtype)
    up, back = up / hidden**0.5, back / width**0.5
    pairs = sort_pairs(chosen, num_experts)
    ends = [0, *pairs.ends.tolist()]
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for tiling in moe.tilings(dtype):
        y = moe.grouped_linear(x, up, pairs, tiling, of_tokens=True)
        z = moe.grouped_linear(y, back, pairs, tiling, of_tokens=False)[pairs.order]
        for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
            rows = x[pairs.order[begin:end] // num_active]
            expected = rows.float() @ up[expert].float().T
            torch.testing.assert_close(y[begin:end].float(), expected, **tolerance)
            expected = y[begin:end].float() @ back[expert].float().T
            torch.testing.assert_close(z[begin:end].float(), expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_of_a_token_are_added_up_by_weight(device, dtype):
    y = torch.randn(7 * 3, 1100).to(device, dtype)
    weights = torch.rand(7, 3).to(device)
    expected = reference.combine(y.view(7, 3, -1), weights)
    out = moe.combine(y, weights)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tilings_follow_the_mean_number_of_pairs(dtype):
    chosen = [moe.tiling_for(n * 8, 8, dtype) for n in (1, 16, 17, 96, 97, 10_000)]
    choices = moe.tilings(dtype)
    last = len(choices) - 1
    assert [choices.index(tiling) for tiling in chosen] == [0, 0, 1, 1, last, last]


@pytest.mark.parametrize("num_tokens", [1, 23])
def test_experts_with_biases_and_clamped_gates_equal_those_computed_one_by_one(device, num_tokens):
    torch.manual_seed(4)
    num_experts, hidden, width = 5, 24, 20
    weights = ExpertWeights(
        torch.randn(num_experts, 2 * width, hidden).to(device) / 2,
        torch.randn(num_experts, hidden, width).to(device) / 2,
        torch.randn(num_experts, 2 * width).to(device),
        torch.randn(num_experts, hidden).to(device),
    )
    parts = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    experts = [
        Expert(
            LoraLinear(2 * i, DenseLinear(gate_up), gate_up_bias, portable.add_lora),
            LoraLinear(2 * i + 1, DenseLinear(down), down_bias, portable.add_lora),
        )
        for i, (gate_up, down, gate_up_bias, down_bias) in enumerate(zip(*parts, strict=True))
    ]
    gate = clamped_gate(ClampedSwiglu(alpha=1.702, limit=1.0))
    looped = LoopedExperts(experts, gate)
    grouped = GroupedExperts(weights, 2, gate, looped)
    x = torch.randn(num_tokens, hidden).to(device)
    generator = torch.Generator().manual_seed(1)
    chosen = random_choices(num_tokens, num_experts, 2, generator).to(device)
    shares = torch.rand(num_tokens, 2).to(device)
    lora = LoraBatch((), {})
    expected = looped.forward(x, chosen, shares, lora)
    torch.testing.assert_close(grouped.forward(x, chosen, shares, lora), expected)


@pytest.mark.parametrize("has_tables", [False, True])
def test_adapters_on_experts_are_added_and_others_leave_the_kernels_alone(
    device, has_tables, monkeypatch
):
    """Slot 0 is on expert 1's first projection, slot 1 on a site of another layer."""
    torch.manual_seed(2)
    rng = random.Random(2)
    num_experts, hidden, width, other = 3, 32, 16, 6
    gate_up = torch.randn(num_experts, 2 * width, hidden).to(device) / 4
    down = torch.randn(num_experts, hidden, width).to(device) / 4
    experts = [
        Expert(
            LoraLinear(2 * i, DenseLinear(gate_up[i]), None, portable.add_lora),
            LoraLinear(2 * i + 1, DenseLinear(down[i]), None, portable.add_lora),
        )
        for i in range(num_experts)
    ]
    gate = Operators().gate("silu")
    looped = LoopedExperts(experts, gate)
    grouped = GroupedExperts(ExpertWeights(gate_up, down), 2, gate, looped)
    arena = PackedArena(600, 1024, device, rng)
    deltas = {slot: random_delta(rng, arena, hidden, 2 * width, torch.float32) for slot in range(2)}
    table = {(0, 2): deltas[0], (1, other): deltas[1]}
    tables = None
    if has_tables:
        part = OutputRange(0, 0, 2 * width)
        shapes = [SiteShape(hidden, (part,))] * 7
        tables = DeviceTables(arena.data.view(-1), torch.float32, shapes, 2, 200)
        enter_deltas(tables, 0, {2: deltas[0]}, {2})
        enter_deltas(tables, 1, {other: deltas[1]})
    x = torch.randn(9, hidden).to(device)
    chosen = random_choices(9, num_experts, 2, torch.Generator().manual_seed(1)).to(device)
    weights = torch.rand(9, 2).to(device)
    plain = looped.forward(x, chosen, weights, LoraBatch((), table))
    reads = note_reads(monkeypatch)
    for slot, is_changed in ((0, True), (1, False)):
        lora = LoraBatch((RowRun(slot, 1.0, 2, 7),), table, tables=tables)
        expected = looped.forward(x, chosen, weights, lora)
        reads.clear()
        found = grouped.forward(x, chosen, weights, lora)
        assert bool(reads) == is_changed
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert expected.allclose(plain) != is_changed


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **MOE}))
    return folder


def make_runner(base, device, cpu_isa):
    settings = {"arena_bytes": 2 << 20, "max_resident": 4, "max_lora_rank": 16}
    settings["host_cache_bytes"] = HOST_CACHE_BYTES
    return build_runner(
        base, device=device.type, dtype="float32", load_format="dummy", cpu_isa=cpu_isa, **settings
    )


def plan_of(requests):
    rows = [PlannedRow(r, r.num_computed, r.num_pending, True, ()) for r in requests]
    return StepPlan(0, tuple(rows))


@pytest.mark.long
def test_a_mixture_over_kernels_equals_one_expert_at_a_time_and_asks_nobody(
    base, device, monkeypatch
):
    outputs, told = {}, {"torch": [], "auto": []}
    for isa in ("torch", "auto"):
        runner = make_runner(base, device, isa)
        free = list(range(runner.arena_blocks))
        requests = []
        for i, prompt in enumerate(PROMPTS):
            request = Request(f"r{i}", list(prompt), SamplingParams(max_tokens=4, seed=i))
            request.routed_from = 0 if i else None
            request.block_tables = [[free.pop(), free.pop()] for _ in runner.kv_group_windows]
            requests.append(request)
        for _ in range(2):
            plan = plan_of(requests)
            for row, sampled in zip(plan.rows, runner.launch(plan).result(), strict=True):
                row.request.num_computed += row.num_tokens
                row.request.output_ids.append(sampled.token_id)
                told[isa].append(sampled.experts)
        with torch.inference_mode():
            plan = plan_of(requests)
            step = runner._batches.read(plan)
            hidden = runner._model.forward(runner._batches.make(step))
        outputs[isa] = [request.output_ids for request in requests], hidden
    assert outputs["auto"][0] == outputs["torch"][0]
    assert told["auto"] == told["torch"]
    assert [bool(experts) for experts in told["auto"]] == [False, True, True] * 2
    torch.testing.assert_close(outputs["auto"][1], outputs["torch"][1], rtol=1e-4, atol=1e-4)

    gpu = runner._batches.gpu
    inputs = gpu.graph_inputs(DECODE)
    with torch.inference_mode():
        inputs.buffer.fill(step, step.runs)
        batch: ForwardBatch = inputs.batch(4, frozenset(), gpu.lora_batch(()))
        reads = note_reads(monkeypatch)
        with AsksNobody() as asked:
            static = forward_static(runner._model, batch)
    assert reads == []
    torch.testing.assert_close(static[:3], outputs["torch"][1], rtol=1e-4, atol=1e-4)
    assert asked.num_operators > 10
    assert asked.questions == []
