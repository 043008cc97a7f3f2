"""Adapters that went to TensorRT-LLM's format and back say what they said before."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from loraplex.adapter_format import geometry_from_folder
from loraplex.errors import InvalidAdapter, InvalidRequest
from loraplex.rewriting.tensors import open_adapter
from loraplex.rewriting.trtllm import CONFIG_FILE, WEIGHTS_FILE, from_trtllm, to_trtllm
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.driving import Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.suite import Stage, make_jobs, set_stage

NUM_NEW_TOKENS = 12
BASES = ("llama", "mixtral")
LONG = ("qwen2-moe", "qwen3-moe", "phi3")
REFUSED = {
    "lm-head", "embedding", "lora-bias", "saved-tables", "saved-norms", "token-rows",
    "saved-linears", "dora-tables", "activated",
}  # fmt: skip
"""What the format has no place for; so are the features with a vocabulary of their own."""


@pytest.fixture(
    scope="module", params=[*BASES, *(pytest.param(n, marks=pytest.mark.long) for n in LONG)]
)
def stage(request, tmp_path_factory) -> Stage:
    return set_stage(request.param, tmp_path_factory.mktemp(request.param))


def _there_and_back(base: TinyBase, folder: Path, out: Path) -> Path:
    geometry = geometry_from_folder(base.folder)
    adapter = open_adapter(folder, geometry)
    to_trtllm(adapter, out / "trt", "F32", geometry, base.folder)
    from_trtllm(out / "trt", out / "back", geometry, dtype="F32", base=base.folder)
    return out / "back"


def test_the_tokens_of_a_mixed_batch_stay_the_same(stage, near_ties, tmp_path):
    first_free = max(stage.slots.values()) + 1
    jobs = make_jobs(stage, 11, NUM_NEW_TOKENS, stagger=True)
    slots: dict[str, int] = {}
    refused = set()
    for name in stage.slots:
        try:
            back = _there_and_back(stage.base, stage.base.folder.parent / name, tmp_path / name)
        except InvalidAdapter:
            refused.add(name)
            continue
        slots[name] = first_free + len(slots)
        stage.driver.load(slots[name], back)
    sometimes = {name for name in refused if "vocab" in name or "added" in name}
    sometimes |= {"bias-all", "bias-lora-only"}  # trained where the base has biases
    assert refused - sometimes == REFUSED & set(stage.slots)
    pairs = [
        (name, Job(greedy(f"{name}-{i}", job.request.prompt_ids, NUM_NEW_TOKENS), ((slot, 1.0),)))
        for i, (name, job) in enumerate(jobs)
        for slot in [slots.get(name)]
        if slot is not None
    ]
    outputs = stage.driver.run([job for _, job in pairs], chunk=19)
    for (name, job), output in zip(pairs, outputs, strict=True):
        tokens, num_prompt = job.request.prompt_ids + output, len(job.request.prompt_ids)
        verdict = Verdict()
        logits64 = partial(stage.reference.logits64, name, tokens)
        verdict.judge(num_prompt, output, stage.reference.logits(name, tokens), logits64, name)
        near_ties.add(verdict)
    assert len(slots) >= 8


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> TinyBase:
    return make_base("llama", tmp_path_factory.mktemp("base"))


def test_the_magnitude_is_divided_by_the_norms_of_the_changed_weight(base, tmp_path):
    """As TensorRT-LLM's loader wants it, which multiplies W x + B A x by it."""
    folder = make_adapter(base, "dora-rslora-attention", tmp_path / "dora")
    geometry = geometry_from_folder(base.folder)
    adapter = open_adapter(folder, geometry)
    with pytest.raises(InvalidRequest, match="--base: is required"):
        to_trtllm(adapter, tmp_path / "none", "F32", geometry)
    to_trtllm(adapter, tmp_path / "trt", "F32", geometry, base.folder)
    config, weights = (np.load(tmp_path / "trt" / name)[0] for name in (CONFIG_FILE, WEIGHTS_FILE))
    assert config[0].tolist() == [1, 0, 5, 1]
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b, magnitude = (
        tensors[f"base_model.model.{name}.{part}"]
        for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    )
    scaled = 16 / 5**0.5 * b
    norms = (base.model.get_submodule(name).weight + scaled @ a).norm(dim=1)
    expected = torch.cat([a.flatten(), scaled.flatten(), magnitude / norms])
    row = torch.from_numpy(weights[0])
    torch.testing.assert_close(row[: len(expected)], expected, atol=1e-6, rtol=1e-6)
    assert not row[len(expected) :].any()


def test_bfloat16_is_rounded_as_torch_rounds_it(base, tmp_path):
    folder = make_adapter(base, "rank-1", tmp_path / "rank-1")
    adapter = open_adapter(folder, geometry_from_folder(base.folder))
    to_trtllm(adapter, tmp_path / "half", "BF16")
    to_trtllm(adapter, tmp_path / "wide", "F32")
    bits = torch.from_numpy(np.load(tmp_path / "half" / WEIGHTS_FILE).view(np.int16))
    wide = torch.from_numpy(np.load(tmp_path / "wide" / WEIGHTS_FILE))
    assert torch.equal(bits.view(torch.bfloat16), wide.to(torch.bfloat16))
