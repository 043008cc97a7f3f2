"""After the start of a runner no step waits for a compiler, whatever comes."""

import random
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from loraplex.api.pooling import Pooling
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan, batch_order
from tests.worker.loading import HOST_CACHE_BYTES, load_adapter, taken
from tests.worker.ops.triton.compilations import counted_compilations
from tests.worker.ops.triton.conftest import INTERPRETING
from tests.worker.tiny import LINEARS, VOCAB, write_adapter, write_base

MAX_STEP_TOKENS = 2048
RANKS = (1, 3, 8, 16, 17, 32, 64, 65, 128, 256)
LENGTHS = (
    1,
    2,
    3,
    15,
    16,
    17,
    31,
    33,
    48,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    300,
    511,
    700,
    1023,
)
LONG = (1024, 1025, 1500, 2000, 2047, 2048)
ALL_LINEAR = tuple(name.split(".")[1] for name in LINEARS)
SAMPLING = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 0.5},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "logit_bias": ((3, 1.0),)},
    {"logprobs": 3},
    {"prompt_logprobs": 2},
)

SETTINGS = (
    ("bfloat16", "none", "auto"),
    ("bfloat16", "none", "fp8"),
    ("bfloat16", "fp8", "auto"),
    ("bfloat16", "int4", "int8"),
    ("float32", "none", "auto"),
)
"""Dtype, scheme of quantisation, and what keys and values are stored as."""

pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")


@triton.jit
def store_one(target, VALUE: tl.constexpr):
    tl.store(target, VALUE)


def test_a_compilation_is_counted_once():
    target = torch.zeros(1, device="cuda")
    with counted_compilations() as names:
        store_one[(1,)](target, 1)
        store_one[(1,)](target, 1)
        store_one[(1,)](target, 2)
    assert len(names) == 2
    assert target.item() == 2


class Steps:
    """A runner with one adapter of every rank, and its free blocks."""

    def __init__(self, root, dtype, quantization, kept, device="cuda"):
        base = write_base(root / "base", max_position_embeddings=4096)
        self.runner = build_runner(
            base,
            device=device,
            dtype=dtype,
            arena_bytes=64 << 20,
            host_cache_bytes=HOST_CACHE_BYTES,
            max_resident=16,
            max_lora_rank=max(RANKS),
            max_num_batched_tokens=MAX_STEP_TOKENS,
            max_num_seqs=320,
            attention_backend="triton",
            quantization=quantization,
            kv_cache_dtype=kept,
        )
        self._rng = random.Random(0)
        self._free = list(range(self.runner.arena_blocks))
        for slot, rank in enumerate(RANKS):
            targets = ALL_LINEAR if slot % 2 else ("q_proj", "v_proj")
            folder = write_adapter(root / f"r{rank}", seed=rank, rank=rank, targets=targets)
            load_adapter(self.runner, slot, folder, partial(taken, self._free))

    def request(self, num_prompt, num_computed, sampling):
        """A request and its blocks; with `num_computed` of its prompt's tokens in the cache."""
        params = SamplingParams(max_tokens=8, seed=3, **sampling)
        prompt = [self._rng.randrange(2, VOCAB) for _ in range(num_prompt)]
        request = Request(f"r{self._rng.random()}", prompt, params)
        num_blocks = -(-(num_prompt + 8) // self.runner.tokens_per_block)
        request.block_tables = [
            [self._free.pop() for _ in range(num_blocks)] for _ in self.runner.kv_group_windows
        ]
        request.num_computed = num_computed
        return request

    def step(self, rows):
        """Compute rows, (request, slots), then give all blocks back."""
        planned = [
            PlannedRow(request, request.num_computed, request.num_pending, True, slots)
            for request, slots in rows
        ]
        planned.sort(key=batch_order)
        self.runner.launch(StepPlan(0, tuple(planned))).result()
        self._free += [b for request, _ in rows for table in request.block_tables for b in table]

    def slots(self):
        """A random adapter, two of them, or none."""
        kind = self._rng.random()
        first, second = self._rng.sample(range(len(RANKS)), 2)
        if kind < 0.1:
            return ()
        return ((first, 1.0),) if kind < 0.95 else ((first, 0.5), (second, 2.0))

    def prompts(self, lengths):
        """One step of whole prompts."""
        sampling = [self._rng.choice(SAMPLING) for _ in lengths]
        requests = [self.request(n, 0, s) for n, s in zip(lengths, sampling, strict=True)]
        self.step([(request, self.slots()) for request in requests])

    def pools(self, length):
        """One step of a prompt whose keys and values are not kept."""
        request = Request("pooled", [7] * length, SamplingParams(max_tokens=1, seed=3))
        request.pooling = Pooling.LAST
        self.step([(request, self.slots())])

    def decodes(self, count, context, prompt=0):
        """One step of `count` requests that decode, alongside a prompt where one is asked for."""
        rows = []
        for _ in range(count):
            request = self.request(context, context, self._rng.choice(SAMPLING))
            request.output_ids = [5]
            rows.append((request, self.slots()))
        if prompt:
            rows.append((self.request(prompt, 0, {}), self.slots()))
        self.step(rows)

    def run_all(self):
        """Steps of all sizes, lengths and kinds."""
        for length in (*LENGTHS, *LONG):
            self.prompts([length])
        for lengths in ([300, 1, 17], [512] * 4, [5] * 40, [1024, 1023], [2, 2046]):
            self.prompts(lengths)
        for length in (1, 40, 2048):
            self.pools(length)
        for count, context in (
            (1, 3),
            (2, 40),
            (3, 1000),
            (17, 33),
            (40, 16),
            (64, 100),
            (1, 4000),
        ):
            self.decodes(count, context)
            self.decodes(count, context, prompt=70)
        self.decodes(257, 5)
        self.decodes(8, 20, prompt=1100)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
def test_no_step_compiles_anything_after_the_start(setting, tmp_path):
    steps = Steps(tmp_path, *setting)
    with counted_compilations() as names:
        steps.run_all()
    assert names == []
