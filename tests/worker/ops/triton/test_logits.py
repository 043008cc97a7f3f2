"""Logits in float32 straight from the head's product."""

import random

import torch

from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.ops.linear.torch import DenseLinear, keeps_float32
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from tests.worker.ops.triton.adapters import PackedArena, random_delta

SITE = 3
NUM_INPUTS, NUM_TOKENS = 64, 200


def test_logits_of_half_precision_keep_float32_where_the_device_can(device):
    torch.manual_seed(0)
    weight = torch.randn(NUM_TOKENS, NUM_INPUTS).bfloat16().to(device)
    x = torch.randn(5, NUM_INPUTS).bfloat16().to(device)
    head = LoraLinear(SITE, DenseLinear(weight), None, portable.add_lora)
    logits = head.forward_float32(x, LoraBatch((), {}), NUM_TOKENS + 2)
    exact = x.float() @ weight.float().T
    expected = exact if keeps_float32(x) else exact.bfloat16().float()
    torch.testing.assert_close(logits[:, :NUM_TOKENS], expected, rtol=2e-5, atol=2e-5)
    assert logits.dtype is torch.float32
    assert logits[:, NUM_TOKENS:].eq(0).all()


def test_an_adapter_adds_to_float32_logits_what_it_adds_in_float32(device):
    torch.manual_seed(1)
    rng = random.Random(1)
    arena = PackedArena(600, 1024, device, rng)
    delta = random_delta(rng, arena, NUM_INPUTS, NUM_TOKENS, torch.bfloat16)
    table = {(0, SITE): delta}
    lora = LoraBatch((RowRun(0, 0.5, 1, 4),), table)
    x = torch.randn(5, NUM_INPUTS).bfloat16().to(device)
    of_half = torch.randn(5, NUM_TOKENS).to(device)
    of_single = of_half.clone()
    portable.add_lora(of_half, x, SITE, lora)
    portable.add_lora(of_single, x.float(), SITE, lora)
    torch.testing.assert_close(of_half, of_single, rtol=1e-6, atol=1e-6)
    assert not of_half[1:4].equal(of_half[0].expand(3, -1))
