"""Sequences whose states are scattered over an arena, and what the reference says of them."""

import random
from dataclasses import astuple

import torch

from loraplex_services.worker.cache.state_layout import plan_state
from loraplex_services.worker.ops.recurrence import reference
from loraplex_services.worker.ops.recurrence.backend import (
    DeltaWeights,
    state_batch,
    state_cells,
)
from loraplex_services.worker.types.model_config import RecurrenceConfig
from loraplex_services.worker.types.step_plan import StateSpan

CONFIGS = {
    "shared-keys": RecurrenceConfig((0, 1, 3), 2, 4, 16, 24, 4),
    "one-head": RecurrenceConfig((2,), 1, 1, 8, 8, 2),
    "odd": RecurrenceConfig((0, 1), 1, 3, 20, 12, 3),
    "published": RecurrenceConfig((0, 1), 2, 4, 128, 128, 4),
}
NUM_BLOCKS = 600


def make_weights(config, generator):
    taps = torch.randn(config.conv_size, config.kernel_size, generator=generator)
    rates = -torch.rand(config.num_value_heads, generator=generator) - 0.02
    return DeltaWeights(taps, rates, torch.randn(config.num_value_heads, generator=generator))


class Sequences:
    """What the reference says of each sequence, and where its state lies."""

    def __init__(self, config, weights, generator, rng, device="cpu"):
        self.config, self.weights, self.generator = config, weights, generator
        most = config.key_dim * config.value_dim * 4
        self.layout = plan_state(config, most * rng.choice((1, 3)) + 64)
        shape = NUM_BLOCKS, self.layout.block_items * 4
        arena = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)  # NaN
        self.cells = state_cells(arena, self.layout)
        self.free = list(range(NUM_BLOCKS))
        rng.shuffle(self.free)

    def blocks(self):
        return [self.free.pop() for _ in range(self.layout.num_blocks)]

    def inputs(self, num_tokens):
        sizes = self.config.conv_size, self.config.num_value_heads, self.config.num_value_heads
        return [torch.randn(num_tokens, size, generator=self.generator) for size in sizes]

    def expected(self, qkv, a, b):
        """Of one whole sequence."""
        config, weights = self.config, self.weights
        before = torch.zeros(config.kernel_size - 1, config.conv_size)
        mixed, _ = reference.causal_conv(qkv, before, weights.taps)
        q, k, v = mixed.split((config.keys_size, config.keys_size, config.values_size), dim=1)
        steps = torch.nn.functional.softplus(a.double() + weights.step_bias)
        shared = config.num_value_heads // config.num_key_heads
        heads = []
        for head in range(config.num_value_heads):
            keys = slice(head // shared * config.key_dim, (head // shared + 1) * config.key_dim)
            values = slice(head * config.value_dim, (head + 1) * config.value_dim)
            state = torch.zeros(config.key_dim, config.value_dim)
            decay = weights.rates[head] * steps[:, head]
            beta = b[:, head].double().sigmoid()
            out, _ = reference.gated_delta(q[:, keys], k[:, keys], v[:, values], decay, beta, state)
            heads.append(out)
        return torch.cat(heads, dim=1)


def check_mixed_steps(
    make_net,
    config,
    seed,
    *,
    lengths=(1, 3, 64, 65, 130),
    counts=(1, 7, 64, 100),
    dtype=torch.float32,
    device="cpu",
):
    """Prompts in random parts and rows that decode, against the reference.

    Args:
        make_net: (config, layer, weights) -> the net under test.
        lengths: of whole sequences, to choose from.
        counts: of tokens in one step, to choose from.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    weights = make_weights(config, generator)
    sequences = Sequences(config, weights, generator, rng, device)
    on_device = DeltaWeights(*(x.to(device) for x in astuple(weights)))
    nets = [make_net(config, layer, on_device) for layer in range(len(config.layers))]
    lengths = [rng.choice(lengths) for _ in range(4)] + [5, 4]
    inputs = [[x.to(dtype) for x in sequences.inputs(length)] for length in lengths]
    states = [(0, sequences.blocks()) for _ in lengths]  # tokens done, blocks of the state
    found = [[] for _ in lengths]
    while any(done < length for (done, _), length in zip(states, lengths, strict=True)):
        rows, parts = [], []
        for i, (done, blocks) in enumerate(states):
            left = lengths[i] - done
            if not left:
                continue
            count = min(left, rng.choice(counts))
            cut = rng.randrange(count + 1) if rng.random() < 0.5 else 0
            spans, source = [], blocks if done else ()
            if cut:
                target = sequences.blocks() if len(sequences.free) > 300 else blocks
                spans, source = [StateSpan(cut, source, target)], target
            if cut < count:
                spans.append(StateSpan(count - cut, source, blocks))
            rows.append((count == 1 and done > 0, i, count, spans))
        rows.sort(key=lambda row: row[0])
        for _, i, count, spans in rows:
            done = states[i][0]
            parts.append([x[done : done + count] for x in inputs[i]])
            states[i] = (done + count, list(spans[-1].target))
        batch = state_batch([row[-1] for row in rows], sequences.cells, sequences.layout)
        joined = torch.cat([torch.cat(xs, dim=1) for xs in parts]).to(device)
        qkv, a, b = joined.split([x.shape[1] for x in inputs[0]], dim=1)  # rows lie apart
        outs = [net.forward(qkv, a, b, batch) for net in nets]
        assert all(torch.equal(out, outs[0]) for out in outs), "layers share blocks"
        begin = 0
        for _, i, count, _ in rows:
            found[i].append(outs[0][begin : begin + count].cpu())
            begin += count
    limits = (3e-5, 1e-4) if dtype is torch.float32 else (1e-2, 2e-2)
    for xs, ours in zip(inputs, found, strict=True):
        expected = sequences.expected(*(x.float() for x in xs))
        torch.testing.assert_close(
            torch.cat(ours).double(), expected, atol=limits[0], rtol=limits[1]
        )
