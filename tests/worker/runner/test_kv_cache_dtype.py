"""Keys and values in codes: how many fit, what they mean, and what knows of it."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.arena_buffer import ArenaBuffer, KvBuffer
from loraplex_services.worker.cache.kv_layout import plan_kv_groups
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.torch import VanillaAttention
from loraplex_services.worker.runner.building import build_runner, store_as_published
from loraplex_services.worker.types.model_config import KvHeads
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.quantised import quantised_base
from tests.worker.parity.runners import parity_runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_base("llama", tmp_path_factory.mktemp("base")).folder


@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 1.93), (128, 1.96), (256, 1.98)])
def test_nearly_twice_as_many_tokens_fit_as_in_bfloat16(head_dim, ratio):
    halves = plan_kv_groups([None] * 24, [KvHeads(8, head_dim)] * 24, itemsize=2)
    codes = plan_kv_groups([None] * 24, [KvHeads(8, head_dim)] * 24, itemsize=1, scale_bytes=2)
    layer_bytes = [groups.block_bytes / len(groups.groups[0].layers) for groups in (halves, codes)]
    assert layer_bytes[0] / layer_bytes[1] >= ratio


def test_codes_and_scales_of_heads_of_an_odd_width_lie_next_to_each_other():
    heads = KvHeads(2, 5)
    groups = plan_kv_groups([None] * 3, [heads] * 3, itemsize=1, scale_bytes=2)
    arena = ArenaBuffer(2, groups.block_bytes, torch.device("cpu"))
    arena.data.zero_()
    kv = KvBuffer(arena, groups, torch.float32, torch.int8)
    for layer in range(3):
        for plane, scales in zip(kv.planes(layer), kv.scales(layer), strict=True):
            assert plane.shape == (2, 2, 16, 5) and not plane.any() and not scales.any()
            plane.fill_(-1)
            scales.fill_(1.0)
    assert all(plane.eq(-1).all() for layer in range(3) for plane in kv.planes(layer))
    assert all(scales.eq(1).all() for layer in range(3) for scales in kv.scales(layer))


def scored(folder, chunk=19, **settings):
    """Logprobs of the tokens of three prompts, which some answers follow."""
    driver = Driver(parity_runner(folder, arena_bytes=8 << 20, **settings))
    rng = random.Random(0)
    jobs = []
    for i, length in enumerate((5, 40, 61)):
        prompt = [rng.randrange(300) for _ in range(length)]
        jobs.append(Job(greedy(f"{i}", prompt, 8, prompt_logprobs=0), (), arrival_step=2 * i))
    outputs = driver.run(jobs, chunk=chunk)
    entries = [
        entry for job in jobs for row in job.samples for entry in row.prompt_logprobs.scored()
    ]
    return torch.tensor([entry.logprob for entry in entries]), outputs


@pytest.mark.parametrize(("kept", "step"), [("int8", 0.05), ("fp8", 0.2)])
def test_compiled_kernels_and_torch_agree_and_stay_near_the_cache_in_float32(folder, kept, step):
    plain, _ = scored(folder)
    compiled, outputs = scored(folder, kv_cache_dtype=kept)
    vanilla, _ = scored(folder, kv_cache_dtype=kept, attention_backend="vanilla")
    # A rounding error may move a code to its neighbour, now and then.
    assert (compiled - vanilla).abs().median() < 1e-4
    assert (compiled - vanilla).abs().max() < step
    assert 1e-5 < (compiled - plain).abs().mean() < step
    recut, again = scored(folder, chunk=7, kv_cache_dtype=kept)
    assert (recut - compiled).abs().max() < step
    assert again == outputs


def test_two_ranks_keep_the_codes_of_their_own_heads(folder):
    alone = Driver(parity_runner(folder, arena_bytes=1 << 20, kv_cache_dtype="int8"))
    group = Driver(parity_runner(folder, arena_bytes=1 << 20, kv_cache_dtype="int8", num_ranks=2))
    said = []
    for driver in (alone, group):
        jobs = [Job(greedy("a", range(2, 40), 8)), Job(greedy("b", range(9, 14), 8))]
        said.append(driver.run(jobs, chunk=19))
    assert said[0] == said[1]
    assert group.runner.block_bytes * 2 == alone.runner.block_bytes
    group.runner.close()


def test_it_is_a_part_of_the_arithmetic_and_not_of_the_base(folder):
    infos = [
        build_runner(folder, device="cpu", arena_bytes=8 << 20, kv_cache_dtype=name).model_info()
        for name in ("auto", "int8", "fp8")
    ]
    assert len({info.numerics_fingerprint for info in infos}) == 3
    assert [info.quantization for info in infos] == ["", "kv-int8", "kv-fp8"]
    assert len({info.geometry.fingerprint for info in infos}) == 1


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A base whose files ask for a KV cache in FP8, with scales for each layer."""
    folder = tmp_path_factory.mktemp("asking")
    base = quantised_base(make_base("llama", folder / "plain"), "ct-fp8", folder / "base").folder
    config = json.loads((base / "config.json").read_bytes())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (base / "config.json").write_text(json.dumps(config))
    tensors = load_file(base / "model.safetensors")
    for name in ("k_scale", "v_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor([0.5])
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    return base


@pytest.mark.parametrize(
    ("setting", "kept"), [("auto", "kv-fp8"), ("int8", "kv-int8"), ("float32", "")]
)
def test_a_base_gets_the_cache_that_its_files_ask_for_unless_the_setting_names_one(
    asking, setting, kept
):
    settings = {"dtype": "float32", "kv_cache_dtype": setting}
    runner = build_runner(asking, device="cpu", arena_bytes=8 << 20, **settings)
    assert runner.model_info().quantization == kept


def test_a_float_type_that_the_base_is_not_computed_in_is_refused_with_the_way_out(folder):
    settings = {"dtype": "float32", "kv_cache_dtype": "bfloat16"}
    with pytest.raises(Unsupported, match="--dtype bfloat16") as refused:
        build_runner(folder, device="cpu", arena_bytes=8 << 20, **settings)
    assert refused.value.violations[0].field == "kv_cache_dtype"


def test_a_backend_without_codes_keeps_the_dtype_of_the_model_and_says_so(caplog):
    class Floats(VanillaAttention):
        kv_cache_dtypes = frozenset()

    maker = AttentionMaker(Floats)
    store_as_published("fp8", maker)
    assert maker.kv_cache_dtype == "auto"
    assert "fp8, which Floats does not store" in caplog.text


def test_what_is_not_known_is_refused_by_name(folder):
    with pytest.raises(InvalidRequest) as refused:
        build_runner(folder, device="cpu", arena_bytes=8 << 20, kv_cache_dtype="int4")
    assert refused.value.violations[0].field == "kv_cache_dtype"
