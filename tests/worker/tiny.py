"""A tiny random Llama and adapters for it, written byte by byte without torch."""

from __future__ import annotations

import array
import json
import random
from pathlib import Path

from loraplex.adapter_format.folder import read_folder
from loraplex.adapter_format.geometry import Geometry, geometry_from_folder
from loraplex.adapter_format.manifest import core_manifest, digest_of
from loraplex.adapter_format.validate import validate
from loraplex_services.common.objects.store import ObjectStore, blob_key
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.model_config import RopeConfig
from loraplex_services.worker.types.own_rope import BaseRopes
from loraplex_services.worker.types.sites import LINEAR, SiteTableBuilder
from tests.adapter_format.builders import good_config, with_header

HIDDEN, KV, INTERMEDIATE, VOCAB, NUM_LAYERS = 32, 16, 48, 96, 2
CONTEXT, EOS = 256, 95

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
"""(out_features, in_features)."""


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """A safetensors file of random float32 tensors."""
    rng = random.Random(seed)
    header: dict[str, object] = {}
    body = b""
    for name, shape in shapes.items():
        count = shape[0] if len(shape) == 1 else shape[0] * shape[1]
        mean = 1.0 if "norm" in name else 0.0
        data = array.array("f", (rng.gauss(mean, 0.3) for _ in range(count))).tobytes()
        span = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": span}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(with_header(text + b" " * (-len(text) % 8), body))


def write_base(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A base in Hugging Face layout; `changes` replace fields of its config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in LINEARS.items()}
    write_tensors(folder / "model.safetensors", shapes, seed)
    return folder


def write_adapter(
    folder: Path,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    use_dora: bool = False,
) -> Path:
    """An adapter as PEFT writes it, with random weights in A and B."""
    folder.mkdir(parents=True)
    config = {**good_config(), "r": rank, "target_modules": list(targets), "use_dora": use_dora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(NUM_LAYERS):
        for name, (out_features, in_features) in LINEARS.items():
            if name.split(".")[1] in targets:
                module = f"base_model.model.model.layers.{layer}.{name}"
                shapes[f"{module}.lora_A.weight"] = (rank, in_features)
                shapes[f"{module}.lora_B.weight"] = (out_features, rank)
                if use_dora:
                    shapes[f"{module}.lora_magnitude_vector"] = (out_features,)
    write_tensors(folder / "adapter_model.safetensors", shapes, seed)
    return folder


def base_geometry(folder: Path) -> Geometry:
    """What adapters of the base are validated against."""
    return geometry_from_folder(folder)


def layout(max_rank: int = 64, block_bytes: int = 1024) -> AdapterLayout:
    """What adapters of the base are packed for, in float32."""
    sites = SiteTableBuilder()
    for layer in range(NUM_LAYERS):
        stacked = (
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        )
        for names in stacked:
            modules = [(f"model.layers.{layer}.{name}", LINEARS[name][0]) for name in names]
            sites.add(layer, LINEAR, LINEARS[names[0]][1], modules)
    ropes = BaseRopes(
        (RopeConfig(HIDDEN // 4, 10000.0),) * NUM_LAYERS, (True,) * NUM_LAYERS, CONTEXT
    )
    return AdapterLayout(block_bytes, "F32", False, max_rank, "tiny", sites.build(), ropes)


async def publish(store: ObjectStore, geometry: Geometry, folder: Path) -> str:
    """Put manifest and files where workers read them; returns the digest."""
    content = read_folder(folder)
    report = validate(
        content.config_bytes,
        content.header_prefix,
        content.tensor_file_size,
        content.files,
        geometry,
    )
    manifest = core_manifest(report, content.files, geometry.fingerprint)
    for file in content.files:
        await store.put(blob_key(file.sha256), (folder / file.path).read_bytes())
    digest = digest_of(manifest)
    await store.put(blob_key(digest), manifest)
    return digest
