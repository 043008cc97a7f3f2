"""Tiny bases written as GGUF files with ggml's own writer, as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import transformers
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from tests.worker.parity.base_fields import COMMON
from tests.worker.parity.bases import TinyBase

WIDTH, INNER, HEADS, KV_HEADS = 256, 512, 4, 2
HEAD_DIMS = {"llama": 64, "qwen2": 64, "qwen3": 128}
"""transformers reads no `key_length` of Qwen 3, whose default is 128."""
PLAIN_TENSORS = ("norm", "bias", "blk.0.attn_v.weight")
"""Stored in full precision in every file; ends of names, or parts of them."""
MIXTURES = {
    "F16": (Type.F16, Type.F16),
    "BF16": (Type.BF16, Type.BF16),
    "Q4_0": (Type.Q4_0, Type.Q8_0),
    "Q5_0": (Type.Q5_0, Type.Q8_0),
    "Q8_0": (Type.Q8_0, Type.Q8_0),
    "Q4_K_M": (Type.Q4_K, Type.Q6_K),
    "Q5_K_M": (Type.Q5_K, Type.Q6_K),
}
"""(type of most tensors, type of `ffn_down`, `attn_v` and the table of tokens)."""
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
    "model.layers.": "blk.",
}


def write_gguf(
    model: transformers.PreTrainedModel,
    mixture: str,
    path: Path,
    change: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> None:
    """Write a Llama or Qwen model of transformers; `change` adds what it likes."""
    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    change(writer)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(HEAD_DIMS[kind])
    writer.add_value_length(HEAD_DIMS[kind])
    writer.add_rope_dimension_count(HEAD_DIMS[kind])
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(config.eos_token_id)
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            _add(writer, name, tensor, kind, mixture)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str, mixture: str) -> None:
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    values = tensor.detach().float().numpy()
    if kind == "llama" and (".attn_q." in name or ".attn_k." in name):
        pairs = values.reshape(-1, 2, HEAD_DIMS[kind] // 2, *values.shape[1:])
        values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    most, others = MIXTURES.get(mixture) or (Type[mixture], Type[mixture])
    if any(part in name for part in PLAIN_TENSORS):
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        return
    own = others if any(part in name for part in ("ffn_down", "attn_v", "token_embd")) else most
    writer.add_tensor(name, _packed(values, own), raw_dtype=own)


def _packed(values: np.ndarray, kind: Type) -> np.ndarray:
    """Blocks of the nearest values; of the K types, which the library only reads, random ones."""
    if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        num_inputs, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(values.size + int(1e6 * abs(values[0, 0])))
        rows, blocks = len(values), values.shape[1] // num_inputs
        packed = rng.integers(0, 256, (rows, blocks, num_bytes), dtype=np.uint8)
        # Scales so that numbers are about as large as the model's own.
        scale = np.float16(np.abs(values).mean() / (32 * 8 if kind != Type.Q6_K else 64 * 16))
        at = slice(-2, None) if kind is Type.Q6_K else slice(0, 2)
        packed[..., at] = np.frombuffer(scale.tobytes(), np.uint8)
        if kind is not Type.Q6_K:
            packed[..., 2:4] = np.frombuffer(np.float16(8 * scale).tobytes(), np.uint8)
        return packed.reshape(rows, -1)
    return gguf.quants.quantize(np.ascontiguousarray(values), kind)


def gguf_model(kind: str) -> transformers.PreTrainedModel:
    """Random weights of a family, with a tied head in `qwen3`."""
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=COMMON["vocab_size"],
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIMS[kind],
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=kind == "qwen3",
        eos_token_id=2,
    )
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * parameter.data.new_empty(parameter.shape).normal_()
        else:
            parameter.data.normal_(0.0, 0.03)
    return model.eval().requires_grad_(False)


def gguf_base(kind: str, mixture: str, folder: Path, target: Path) -> TinyBase:
    """A base in a GGUF file, translated to the folder `target`, and as transformers reads it."""
    from loraplex_services.worker.model.formats.gguf_folder import write_folder

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "base.gguf"
    write_gguf(gguf_model(kind), mixture, path)
    (folder / "tokenizer.json").write_text("{}")
    write_folder(path, target)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=path.name, dtype="float32", attn_implementation="eager"
    )
    return TinyBase(f"{kind}-{mixture}", target, model.eval().requires_grad_(False))
