"""Requests that end with a hidden state, through the engine and the real runner."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.api.output import FinishReason
from loraplex.api.pooling import Pooling
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.types.messages import Submit, TokenOutput
from tests.worker import tiny
from tests.worker.commands import make_config, make_submit

CHUNK = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base(tmp_path_factory.mktemp("tiny") / "base")


def make_engine(base: Path, max_step_tokens: int, cpu_isa: str = "auto") -> Engine:
    runner = build_runner(base, device="cpu", dtype="float32", arena_bytes=1 << 20, cpu_isa=cpu_isa)
    config = make_config(
        model_dir=str(base), max_num_batched_tokens=max_step_tokens, max_num_seqs=8
    )
    return Engine(runner, config, time.monotonic)


@pytest.fixture(scope="module")
def engine(base: Path) -> Engine:
    torch.set_num_threads(1)
    return make_engine(base, CHUNK)


def submit(request_id: str, num_prompt: int, pooling: Pooling = Pooling.NONE) -> Submit:
    prompt_ids = [(7 * i + num_prompt) % 90 for i in range(num_prompt)]
    sampling = SamplingParams(max_tokens=0 if pooling else 6, seed=0, ignore_eos=True)
    return make_submit(request_id, prompt_ids, sampling, pooling=pooling)


def run(engine: Engine, *commands: Submit) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    step = engine.step(commands)
    while True:
        for token in step.tokens:
            outputs.setdefault(token.request_id, []).append(token)
        if not engine.has_requests:
            return outputs
        step = engine.step(())
        engine.check_integrity()


def test_a_vector_comes_once_with_the_end_and_without_tokens(engine: Engine) -> None:
    [last] = run(engine, submit("v", 3 * CHUNK + 5, Pooling.LAST))["v"]
    assert len(last.pooled) == tiny.HIDDEN and any(last.pooled)
    assert (last.token_ids, last.finish_reason) == ([], FinishReason.LENGTH)


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_neighbours_chunks_and_cached_prefixes_change_no_vector(
    engine: Engine, pooling: Pooling
) -> None:
    alone = {n: run(engine, submit("v", n, pooling))["v"][0].pooled for n in (3, 40, 70)}
    requests = [submit(f"v{n}", n, pooling) for n in alone]
    together = run(engine, submit("text", 9), *requests)
    assert sum(len(output.token_ids) for output in together["text"]) == 6
    assert not any(output.pooled for output in together["text"])
    for n, vector in alone.items():
        assert together[f"v{n}"][0].pooled == pytest.approx(vector, abs=1e-5)


@pytest.mark.parametrize("cpu_isa", ["auto", "torch"])
@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_vectors_are_the_same_with_and_without_the_cache(
    engine: Engine, base: Path, pooling: Pooling, cpu_isa: str
) -> None:
    wide = make_engine(base, 4 * CHUNK, cpu_isa)
    requests = [submit(f"v{n}", n, pooling) for n in (1, 17, 40)]
    step = wide.step(requests)
    assert wide._arena.num_free == step.load.total_blocks, "their KV is kept"
    uncached = {token.request_id: [token] for token in step.tokens}
    for name, [output] in run(engine, *requests[1:]).items():
        assert uncached[name][0].pooled == pytest.approx(output.pooled, abs=1e-5)


def test_the_mean_is_that_of_the_last_states_of_all_beginnings(engine: Engine) -> None:
    ids = submit("", 20).request.prompt_ids
    states = []
    for end in range(1, len(ids) + 1):
        asked = replace(submit("v", 20, Pooling.LAST).request, prompt_ids=ids[:end])
        states.append(run(engine, Submit(request=asked))["v"][0].pooled)
    [mean] = run(engine, submit("v", 20, Pooling.MEAN))["v"]
    assert mean.pooled == pytest.approx(torch.tensor(states).mean(dim=0).tolist(), abs=1e-5)
