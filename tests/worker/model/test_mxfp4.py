"""gpt-oss as it is published: four-bit experts, biases in bfloat16, keys under two names."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from loraplex.adapter_format import geometry_from_folder
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.model.mxfp4 import dequantised
from tests.worker.parity.base_fields import COMMON
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.runners import parity_runner

NUM_EXPERTS, HIDDEN, WIDTH = 3, 64, 32
CONFIG = {
    **COMMON,
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 2,
    "head_dim": 24,
    "hidden_size": HIDDEN,
    "initial_context_length": 64,
    "intermediate_size": WIDTH,
    "layer_types": ["sliding_attention", "full_attention"],
    "model_type": "gpt_oss",
    "num_experts_per_tok": 2,
    "num_local_experts": NUM_EXPERTS,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 17,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def random_mxfp4(generator, num_outputs, num_inputs):
    groups = (NUM_EXPERTS, num_outputs, num_inputs // 32)
    blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(121, 126, groups, dtype=torch.uint8, generator=generator)
    return blocks, scales


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The files of a tiny base, laid out as those of gpt-oss-20b."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    plain = {k: v for k, v in CONFIG.items() if k != "quantization_config"}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**plain))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.15 + (parameter.dim() == 1)
        projection = name.rpartition(".")[2]
        if projection == "gate_up_proj":
            packed = random_mxfp4(generator, 2 * WIDTH, HIDDEN)
        elif projection == "down_proj":
            packed = random_mxfp4(generator, HIDDEN, WIDTH)
        else:
            tensors[name] = values.bfloat16()
            continue
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_every_code_and_scale_is_what_transformers_makes_of_it():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.tensor(
        [[[0, 1, 60, 100, 120, 126, 127, 128, 130, 140, 150, 180, 200, 220, 240, 252]]]
    )
    scales = scales.to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert dequantised(blocks[0], scales[0]).equal(expected[0].T)


def test_a_published_checkpoint_computes_what_transformers_computes(published):
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        published, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert type(reference.model.layers[0].mlp.experts).__name__ == "GptOssExperts"
    reference = reference.float().eval()
    driver = Driver(parity_runner(published, arena_bytes=8 << 20))
    generator = torch.Generator().manual_seed(1)
    for length in (1, 40, 100):
        prompt = torch.randint(0, 300, (length,), generator=generator).tolist()
        job = Job(greedy(str(length), prompt, 16, logprobs=0))
        driver.run([job], chunk=19)
        tokens = prompt + job.request.output_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)[length - 1 : -1]
        assert logits.argmax(-1).tolist() == job.request.output_ids
        found = [sample.logprobs.logprob for sample in job.samples if sample.logprobs]
        assert found == pytest.approx(logits.max(-1).values.tolist(), abs=1e-4)


def test_its_geometry_names_each_expert(published):
    geometry = geometry_from_folder(published)
    modules = {module.name: module for module in geometry.modules}
    gate_up = modules["model.layers.1.mlp.experts.2.gate_up_proj"]
    down = modules["model.layers.0.mlp.experts.0.down_proj"]
    assert (gate_up.in_features, gate_up.out_features, gate_up.has_bias) == (64, 64, True)
    assert (down.in_features, down.out_features, down.has_bias) == (32, 64, True)
    assert modules["model.layers.0.mlp.router"].has_bias


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", None])
def test_other_quantisations_are_refused_by_name(published, tmp_path, method):
    config = {**CONFIG, "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported) as error:
        read_model_config(tmp_path)
    assert error.value.violations[0].field == "config.json:quantization_config"
    (tmp_path / "model.safetensors").symlink_to(published / "model.safetensors")
    with pytest.raises(InvalidRequest) as error:
        geometry_from_folder(tmp_path)
    assert error.value.violations[0].field == "config.json:quantization_config"
