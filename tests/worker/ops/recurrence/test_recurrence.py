"""Gated delta nets over scattered states == the reference, token by token."""

import random
from functools import partial

import pytest
import torch

from loraplex_services.worker.ops.recurrence.backend import state_batch
from loraplex_services.worker.ops.recurrence.cpu import NativeDeltaNet
from loraplex_services.worker.ops.recurrence.torch import TorchDeltaNet
from loraplex_services.worker.types.step_plan import StateSpan
from tests.worker.native.isas import ISAS, native
from tests.worker.ops.recurrence.sequences import (
    CONFIGS,
    Sequences,
    check_mixed_steps,
    make_weights,
)


def maker(kind):
    return TorchDeltaNet if kind == "torch" else partial(NativeDeltaNet, native(kind))


@pytest.mark.parametrize("kind", ["torch", *ISAS])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(2))
def test_spans_of_mixed_steps_equal_the_reference(kind, name, seed):
    check_mixed_steps(maker(kind), CONFIGS[name], seed)


@pytest.mark.parametrize("isa", ISAS)
def test_compiled_states_and_outputs_do_not_depend_on_how_a_prompt_is_cut(isa):
    config = CONFIGS["shared-keys"]
    generator = torch.Generator().manual_seed(5)
    weights = make_weights(config, generator)
    sequences = Sequences(config, weights, generator, random.Random(5))
    net = maker(isa)(config, 1, weights)
    inputs = sequences.inputs(97)
    found = []
    for cuts in ([97], [1, 96], [16, 1, 80], [1] * 97):
        blocks, begin, outs = sequences.blocks(), 0, []
        for count in cuts:
            rows = slice(begin, begin + count)
            span = StateSpan(count, blocks if begin else (), blocks)
            batch = state_batch([[span]], sequences.cells, sequences.layout)
            outs.append(net.forward(*(x[rows] for x in inputs), batch))
            begin += count
        cells = sequences.layout.layer_cells
        states = sequences.cells[blocks].flatten(0, 1)[cells : 2 * cells]
        found.append((torch.cat(outs), states))
    for out, states in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(states[: config.num_value_heads], found[0][1][: config.num_value_heads])
