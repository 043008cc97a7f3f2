"""Adapters with a longer context than the base's, over the kernels and in torch."""

import json
import random
from functools import partial

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.worker.loading import load_adapter, taken
from tests.worker.tiny import write_adapter, write_base

NUM_STEPS = 5


def outputs_of(root, backend, device):
    """Tokens of a request that outgrows the space for the base's context, which is 64 tokens, while
    it decodes with the adapter, and of one of the base in the same steps."""
    settings = {"arena_bytes": 1 << 20, "max_resident": 2, "attention_backend": backend}
    runner = build_runner(root / "base", device=device.type, dtype="float32", **settings)
    free = list(range(runner.arena_blocks))
    load_adapter(runner, 0, root / "adapter", partial(taken, free))
    rng = random.Random(0)
    requests = {}
    for num_prompt, slots in ((62, ((0, 1.0),)), (9, ())):
        prompt = [rng.randrange(90) for _ in range(num_prompt)]
        sampling = SamplingParams(max_tokens=NUM_STEPS, seed=1)
        request = Request(str(num_prompt), prompt, sampling)
        request.block_tables = [[] for _ in runner.kv_group_windows]
        requests[request] = slots
    for step in range(NUM_STEPS):
        rows = []
        for request, slots in requests.items():
            for table in request.block_tables:
                while len(table) * runner.tokens_per_block < request.num_tokens:
                    table.append(free.pop())
            start, num_tokens = request.num_computed, request.num_pending
            rows.append(PlannedRow(request, start, num_tokens, True, slots))
        results = runner.launch(StepPlan(step, tuple(rows))).result()
        for request, sampled in zip(requests, results, strict=True):
            request.num_computed = request.num_tokens
            request.output_ids.append(sampled.token_id)
    return [request.output_ids for request in requests]


def test_sequences_may_outgrow_the_context_of_the_base(tmp_path, device):
    write_base(tmp_path / "base", max_position_embeddings=64)
    config = write_adapter(tmp_path / "adapter", seed=1) / "adapter_config.json"
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 4}}
    config.write_text(json.dumps(json.loads(config.read_text()) | scaling))
    expected = outputs_of(tmp_path, "vanilla", device)
    assert outputs_of(tmp_path, "triton", device) == expected
