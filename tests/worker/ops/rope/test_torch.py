"""Rotary frequencies against transformers, for every scaling method that is served."""

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.rope_config import read_rope
from loraplex_services.worker.ops.rope.torch import Rotary, rotate

HEAD_DIM = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PARAMS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": YARN,
    "yarn-factor": {**YARN, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_rotation_equals_transformers(params):
    params = {**params, "rope_theta": 5000.0}
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=dict(params),
    )
    positions = torch.tensor([0, 1, 17, 200, 511])
    q = torch.randn(5, 4, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    reader = ModelConfigReader({"rope_parameters": params, "max_position_embeddings": 512})
    rotary = Rotary(read_rope(reader, HEAD_DIM), torch.device("cpu"))
    actual = rotate(q, rotary.cos_sin(positions, torch.float32))
    torch.testing.assert_close(actual, expected[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_old_and_new_spellings_mean_the_same():
    scaling = {"type": "linear", "factor": 2.0}
    old = ModelConfigReader({"rope_theta": 777.0, "rope_scaling": scaling})
    new = ModelConfigReader(
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}}
    )
    assert read_rope(old, HEAD_DIM) == read_rope(new, HEAD_DIM)


def test_components_beyond_the_rotated_part_stay():
    reader = ModelConfigReader({"partial_rotary_factor": 0.25})
    rotary = Rotary(read_rope(reader, HEAD_DIM), torch.device("cpu"))
    x = torch.randn(3, 2, HEAD_DIM)
    turned = rotate(x, rotary.cos_sin(torch.tensor([3, 4, 5]), torch.float32))
    assert rotary.dim == 8
    assert turned[..., 8:].equal(x[..., 8:])
    assert not turned[..., :8].equal(x[..., :8])


def test_an_odd_part_of_the_head_is_rounded_up_as_in_transformers():
    params = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.17}
    config = transformers.Phi3Config(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        pad_token_id=0,
        rope_parameters=dict(params),
    )
    positions = torch.tensor([1, 7, 300])
    expected, _ = Phi3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    rope = read_rope(ModelConfigReader({"rope_parameters": params}), HEAD_DIM)
    assert rope.dim == 5
    cos, _ = Rotary(rope, torch.device("cpu")).cos_sin(positions, torch.float32)
    torch.testing.assert_close(cos[:, 0], expected[0, :, : cos.shape[-1]], rtol=0, atol=0)
    assert 2 * cos.shape[-1] == expected.shape[-1]
