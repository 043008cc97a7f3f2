"""Kernels of the gated delta net over scattered states == the reference, token by token."""

import random
from dataclasses import astuple

import pytest
import torch

from loraplex_services.worker.ops.recurrence.backend import DeltaWeights, state_batch
from loraplex_services.worker.ops.recurrence.triton import TritonDeltaNet
from loraplex_services.worker.types.step_plan import StateSpan
from tests.worker.ops.recurrence.sequences import (
    CONFIGS,
    Sequences,
    check_mixed_steps,
    make_weights,
)
from tests.worker.ops.triton.conftest import INTERPRETING

FEW = {"lengths": (1, 2, 16, 17, 33), "counts": (1, 2, 16, 40)}
MANY = {"lengths": (1, 3, 64, 65, 300), "counts": (1, 7, 64, 100, 300)}


@pytest.mark.parametrize(
    ("name", "dtype"), [("odd", torch.float32), ("one-head", torch.bfloat16)], ids=str
)
def test_spans_of_mixed_steps_equal_the_reference(name, dtype, device):
    """With this seed, a block of the arena holds the states of three heads."""
    check_mixed_steps(TritonDeltaNet, CONFIGS[name], 5, dtype=dtype, device=device, **FEW)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(2, 4))
def test_many_spans_of_mixed_steps_equal_the_reference(name, dtype, seed, device):
    sizes = FEW if INTERPRETING else MANY
    check_mixed_steps(TritonDeltaNet, CONFIGS[name], seed, dtype=dtype, device=device, **sizes)


def test_spans_without_tokens_or_without_a_target_leave_the_arena_as_it_is(device):
    """Rows of padding, and of steps that only warm up."""
    config, generator = CONFIGS["shared-keys"], torch.Generator().manual_seed(0)
    weights = make_weights(config, generator)
    sequences = Sequences(config, weights, generator, random.Random(0), device)
    net = TritonDeltaNet(config, 0, DeltaWeights(*(x.to(device) for x in astuple(weights))))
    nowhere = [-1] * sequences.layout.num_blocks
    rows = [[StateSpan(20, (), nowhere)], [StateSpan(1, (), nowhere)]]
    batch = state_batch(rows, sequences.cells, sequences.layout)
    before = sequences.cells.clone()
    qkv, a, b = (x.to(device) for x in sequences.inputs(21))
    assert net.forward(qkv, a, b, batch).isfinite().all()
    batch.words.zero_()
    batch.targets.fill_(3)
    net.forward(qkv, a, b, batch)
    assert torch.equal(sequences.cells.view(torch.int32), before.view(torch.int32))
