"""gpt-oss as it is published: four-bit experts, biases in bfloat16, keys under two names."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from loraplex.adapter_format import geometry_from_folder
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.model.mxfp4 import dequantised
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.mxfp4_files import CONFIG, write_published
from tests.worker.parity.runners import parity_runner


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The files of a tiny base, laid out as those of gpt-oss-20b."""
    return write_published(tmp_path_factory.mktemp("gpt-oss"))


def test_every_code_and_scale_is_what_transformers_makes_of_it():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.tensor(
        [[[0, 1, 60, 100, 120, 126, 127, 128, 130, 140, 150, 180, 200, 220, 240, 252]]]
    )
    scales = scales.to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert dequantised(blocks[0], scales[0]).equal(expected[0].T)


def test_a_scale_that_is_no_number_is_refused_by_name(published, tmp_path):
    tensors = load_file(published / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name].view(-1)[3] = 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").symlink_to(published / "config.json")
    with pytest.raises(InvalidRequest, match="is not a scale in MXFP4") as caught:
        parity_runner(tmp_path, arena_bytes=8 << 20)
    assert caught.value.violations[0].field == name


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_published_checkpoint_computes_what_transformers_computes(published, num_ranks):
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        published, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert type(reference.model.layers[0].mlp.experts).__name__ == "GptOssExperts"
    reference = reference.float().eval()
    driver = Driver(parity_runner(published, arena_bytes=8 << 20, num_ranks=num_ranks))
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
    driver.runner.close()


def test_its_geometry_names_each_expert(published):
    geometry = geometry_from_folder(published)
    modules = {module.name: module for module in geometry.modules}
    gate_up = modules["model.layers.1.mlp.experts.2.gate_up_proj"]
    down = modules["model.layers.0.mlp.experts.0.down_proj"]
    assert (gate_up.in_features, gate_up.out_features, gate_up.has_bias) == (64, 64, True)
    assert (down.in_features, down.out_features, down.has_bias) == (32, 64, True)
    assert modules["model.layers.0.mlp.router"].has_bias


@pytest.mark.parametrize("method", ["quark", None])
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
