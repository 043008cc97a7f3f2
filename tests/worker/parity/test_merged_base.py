"""Adapters merged into the base say what they say in a mixed batch, in transformers and here."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from loraplex.adapter_format import geometry_from_folder
from loraplex.errors import InvalidAdapter
from loraplex.rewriting.into_base import merge_into_base
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner
from tests.worker.parity.suite import Stage, make_jobs, set_stage

NUM_NEW_TOKENS = 12
BASES = ("llama-yarn-biases", "mixtral")
LONG = ("llama", "llama3-rope-tied", "qwen2", "qwen2-moe", "qwen3-moe", "phi3", "gemma2", "gemma3")
REFUSED = {"activated": "alora_invocation_tokens", "lora-bias": "the base has no bias here"}


@pytest.fixture(
    scope="module", params=[*BASES, *(pytest.param(n, marks=pytest.mark.long) for n in LONG)]
)
def stage(request, tmp_path_factory) -> Stage:
    return set_stage(request.param, tmp_path_factory.mktemp(request.param))


def _folder(stage: Stage, name: str) -> Path:
    """Of an adapter of the stage."""
    return stage.base.folder.parent / name


def _is_refused(stage: Stage, name: str) -> bool:
    has_biases = getattr(stage.base.model.config, "mlp_bias", False)
    return name in REFUSED and not (name == "lora-bias" and has_biases)


@torch.inference_mode()
def test_each_adapter_merged_gives_the_tokens_of_the_mixed_batch(stage, near_ties, tmp_path):
    jobs = make_jobs(stage, 7, NUM_NEW_TOKENS, stagger=True)
    stage.driver.run([job for _, job in jobs], chunk=19)
    done = set()
    for name, job in jobs:
        if name is None or name in done or _is_refused(stage, name):
            continue
        done.add(name)
        folder = tmp_path / name
        merge_into_base([(_folder(stage, name), 1.0)], stage.base.folder, folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        _judge(stage, job, job.request.output_ids, model.eval(), name, near_ties)

        own = Driver(parity_runner(folder, arena_bytes=8 << 20))
        [output] = own.run([Job(greedy(name, job.request.prompt_ids, NUM_NEW_TOKENS))])
        verdict = Verdict()
        tokens = job.request.prompt_ids + output
        verdict.judge(
            len(job.request.prompt_ids), output, stage.reference.logits(name, tokens),
            partial(stage.reference.logits64, name, tokens), f"served merged {name}",
        )  # fmt: skip
        near_ties.add(verdict)
    assert len(done) > 10


def _judge(stage, job, ours, model, name, near_ties) -> None:
    tokens, num_prompt = job.request.prompt_ids + ours, len(job.request.prompt_ids)
    verdict = Verdict()
    logits64 = partial(stage.reference.logits64, name, tokens)
    verdict.judge(num_prompt, ours, stage.reference.logits_of(model, tokens, num_prompt), logits64,
                  f"transformers, merged {name}")  # fmt: skip
    near_ties.add(verdict)


def test_what_no_checkpoint_can_hold_is_refused_by_name(stage, tmp_path):
    for name, problem in REFUSED.items():
        if not _is_refused(stage, name) or name not in stage.slots:
            continue
        with pytest.raises(InvalidAdapter) as caught:
            merge_into_base([(_folder(stage, name), 1.0)], stage.base.folder, tmp_path / name)
        [violation] = caught.value.violations
        assert problem in f"{violation.field}: {violation.description}"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> TinyBase:
    return make_base("llama", tmp_path_factory.mktemp("base"), shard_bytes=60_000)


def test_several_adapters_are_summed_with_their_weights(base, tmp_path):
    names = ("rank-4-attention", "rslora", "lm-head")
    folders = {name: make_adapter(base, name, tmp_path / name) for name in names}
    weights = dict(zip(names, (0.7, -0.4, 1.0), strict=True))
    merge_into_base(
        [(folders[name], weights[name]) for name in names], base.folder, tmp_path / "out"
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    reference = Reference(base, folders)
    state = dict(base.model.state_dict())
    for name in names:
        for key, value in reference.merged(name).state_dict().items():
            state[key] = state[key] + weights[name] * (value - base.model.state_dict()[key])
    for key, value in merged.state_dict().items():
        torch.testing.assert_close(value, state[key], atol=1e-5, rtol=1e-5)


def test_shards_keep_their_files_and_untouched_tensors_their_bytes(base, tmp_path):
    folder = make_adapter(base, "rank-1", tmp_path / "rank-1")
    merged = merge_into_base([(folder, 1.0)], base.folder, tmp_path / "out")
    assert (merged.num_modules, merged.max_rank, merged.is_untied) == (4, 1, False)
    index = "model.safetensors.index.json"
    before, after = (
        json.loads((path / index).read_bytes()) for path in (base.folder, tmp_path / "out")
    )
    assert before["weight_map"] == after["weight_map"]
    assert len(set(after["weight_map"].values())) > 2
    changed = set()
    for file in sorted(set(after["weight_map"].values())):
        old, new = load_file(base.folder / file), load_file(tmp_path / "out" / file)
        assert old.keys() == new.keys()
        changed |= {name for name in old if not torch.equal(old[name], new[name])}
    assert {name.rpartition("self_attn.")[2] for name in changed} == {
        "q_proj.weight",
        "v_proj.weight",
    }
    geometry = geometry_from_folder(base.folder)
    assert geometry_from_folder(tmp_path / "out") == geometry


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_another_dtype_is_rounded_once(base, tmp_path, dtype):
    folder = make_adapter(base, "rank-8-all-linear", tmp_path / "adapter")
    merge_into_base([(folder, 1.0)], base.folder, tmp_path / "exact")
    merge_into_base([(folder, 1.0)], base.folder, tmp_path / "half", dtype)
    exact, half = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        for name in ("exact", "half")
    )
    for (name, wide), narrow in zip(
        exact.state_dict().items(), half.state_dict().values(), strict=True
    ):
        assert torch.equal(wide.to(narrow.dtype), narrow), name
    assert {str(value.dtype) for value in half.state_dict().values()} == {
        "torch.bfloat16" if dtype == "BF16" else "torch.float16"
    }


def test_parts_that_replace_the_base_are_merged_alone_with_weight_one(base, tmp_path):
    dora = make_adapter(base, "dora", tmp_path / "dora")
    plain = make_adapter(base, "rank-1", tmp_path / "rank-1")
    for folders in ([(dora, 0.5)], [(dora, 1.0), (plain, 1.0)]):
        with pytest.raises(InvalidAdapter, match="merge this adapter alone, with weight 1"):
            merge_into_base(folders, base.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_value_too_large_for_float16_is_refused_by_the_tensor(base, tmp_path):
    folder = make_adapter(base, "rank-1", tmp_path / "rank-1")
    with pytest.raises(InvalidAdapter, match=r"q_proj\.weight: has values that float16 cannot"):
        merge_into_base([(folder, float(np.float32(1e9)))], base.folder, tmp_path / "out", "F16")
    assert not (tmp_path / "out").exists()
