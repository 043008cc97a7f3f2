"""Adapters made by hand, byte by byte, for tests that need one wrong in exactly one place."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import pytest

from loraplex.adapter_format import Geometry, Module, Report, read_folder, validate
from loraplex.errors import InvalidAdapter

PREFIX = "base_model.model."
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1, "I32": 4}
NUM_LAYERS, HIDDEN, KV, INTERMEDIATE, VOCAB = 2, 8, 4, 12, 16

LAYER_SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
"""(in_features, out_features) of the linears of a layer."""


def tiny_geometry(model_type: str = "llama") -> Geometry:
    """A base of two layers in the shape of Llama."""
    modules = [
        Module("lm_head", "lm_head", HIDDEN, VOCAB, False),
        Module("model.embed_tokens", "embedding", VOCAB, HIDDEN, False),
        Module("model.norm", "norm", HIDDEN, HIDDEN, False),
    ]
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        modules.append(Module(f"{prefix}.input_layernorm", "norm", HIDDEN, HIDDEN, False))
        for name, (in_features, out_features) in LAYER_SHAPES.items():
            modules.append(Module(f"{prefix}.{name}", "linear", in_features, out_features, False))
    modules.sort(key=lambda module: module.name)
    return Geometry(model_type, "sha256:" + "0" * 64, NUM_LAYERS, VOCAB, False, tuple(modules))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write; values repeat `fill`, the bytes of one element."""

    dtype: str
    shape: tuple[int, ...]
    fill: bytes = b""

    def data(self) -> bytes:
        """All bytes of the tensor."""
        one = {"F32": struct.pack("<f", 0.5), "F16": struct.pack("<e", 0.5), "BF16": b"\x00\x3f"}
        fill = self.fill or one.get(self.dtype, b"\x01" * ITEM_BYTES[self.dtype])
        return fill * prod(self.shape)


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A well-formed safetensors file."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    body = b""
    for name, tensor in tensors.items():
        data = tensor.data()
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    return with_header(json.dumps(header).encode(), body)


def with_header(header: bytes, body: bytes) -> bytes:
    """A file of any header text and body."""
    return len(header).to_bytes(8, "little") + header + body


def split_file(data: bytes) -> tuple[dict[str, object], bytes]:
    """The header object and the body of a file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def lora_pair(module: str, rank: int, dtype: str = "F32") -> dict[str, Tensor]:
    """lora_A and lora_B of one module of the tiny base, named as PEFT names them."""
    in_features, out_features = LAYER_SHAPES[module.split(".", 3)[3]]
    return {
        f"{PREFIX}{module}.lora_A.weight": Tensor(dtype, (rank, in_features)),
        f"{PREFIX}{module}.lora_B.weight": Tensor(dtype, (out_features, rank)),
    }


def modules_named(*names: str) -> list[str]:
    """The modules of all layers whose last part is in `names`."""
    return [
        f"model.layers.{layer}.{module}"
        for layer in range(NUM_LAYERS)
        for module in LAYER_SHAPES
        if module.split(".")[1] in names
    ]


def good_config() -> dict[str, object]:
    """A config as PEFT writes it, every field present."""
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "example/tiny",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "kasa_config": None,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 16,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "lora_ga_config": None,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "monteclora_config": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["v_proj", "q_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_bdlora": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        "velora_config": None,
    }


def good_tensors(rank: int = 4, dtype: str = "F32") -> dict[str, Tensor]:
    """The tensors that belong to `good_config`."""
    tensors: dict[str, Tensor] = {}
    for module in modules_named("q_proj", "v_proj"):
        tensors.update(lora_pair(module, rank, dtype))
    return tensors


@dataclass(frozen=True, slots=True)
class Adapter:
    """The two files of an adapter."""

    config: bytes = field(default_factory=lambda: json.dumps(good_config()).encode())
    tensors: bytes = field(default_factory=lambda: tensor_file(good_tensors(), {"format": "pt"}))

    def with_config(self, **fields: object) -> Adapter:
        """Change fields of the config; `...` removes one."""
        config = json.loads(self.config)
        config.update(fields)
        kept = {key: value for key, value in config.items() if value is not ...}
        return replace(self, config=json.dumps(kept).encode())

    def with_tensors(self, changes: Mapping[str, Tensor | None]) -> Adapter:
        """Add or replace tensors by name; None removes one."""
        tensors: dict[str, Tensor | None] = {**good_tensors(), **changes}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return replace(self, tensors=tensor_file(kept, {"format": "pt"}))

    def validate(
        self,
        geometry: Geometry | None = None,
        *,
        max_rank: int = 256,
        strict: bool = False,
        allow_missing: bool = False,
    ) -> Report:
        """Run the validator on the files."""
        size = len(self.tensors)
        return validate(
            self.config,
            self.tensors,
            size,
            (),
            geometry,
            max_rank,
            strict,
            allow_missing=allow_missing,
        )


def write(folder: Path, **fields: object) -> Path:
    """An adapter's folder; `fields` are those of its config that differ."""
    adapter = Adapter()
    config = json.loads(adapter.config) | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(adapter.tensors)
    return folder


def refused(folder: Path) -> dict[str, str]:
    """Why a folder is refused, by field."""
    with pytest.raises(InvalidAdapter) as caught:
        read_folder(folder)
    return {violation.field: violation.description for violation in caught.value.violations}
