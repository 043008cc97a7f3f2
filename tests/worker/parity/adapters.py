"""Random adapters as PEFT writes them, one for each feature of LoRA."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.worker.parity.bases import TinyBase
from tests.worker.parity.module_names import with_names_of

DELTA_NETS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

FEATURES: dict[str, dict[str, object]] = {
    "rank-1": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    "rank-4-attention": {"r": 4, "target_modules": ATTENTION},
    "rank-8-all-linear": {"r": 8, "target_modules": "all-linear"},
    "rank-16-mlp": {"r": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "rank-33-odd": {"r": 33, "target_modules": ["k_proj", "down_proj"]},
    "rank-64-all-linear": {"r": 64, "target_modules": "all-linear"},
    "rslora": {"r": 16, "use_rslora": True, "target_modules": "all-linear"},
    "dora": {"r": 8, "use_dora": True, "target_modules": "all-linear"},
    "dora-rslora-attention": {
        "r": 5,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["q_proj", "o_proj", "up_proj"],
    },
    "patterns": {
        "r": 6,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 12, r"layers\.1\.mlp\.down_proj": 3},
        "alpha_pattern": {"k_proj": 40, "o_proj": 1},
    },
    "one-layer": {
        "r": 8,
        "target_modules": ATTENTION,
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "regex-excluded": {
        "r": 8,
        "target_modules": r".*\.(q_proj|gate_proj|down_proj)",
        "exclude_modules": r".*layers\.0.*",
    },
    "lm-head": {"r": 8, "target_modules": ["q_proj", "lm_head"]},
    "embedding": {"r": 8, "target_modules": ["embed_tokens", "v_proj"]},
    "lora-bias": {"r": 8, "lora_bias": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    "bias-all": {"r": 4, "bias": "all", "target_modules": ["q_proj"]},
    "bias-lora-only": {"r": 4, "bias": "lora_only", "target_modules": ["q_proj", "down_proj"]},
    "saved-tables": {
        "r": 4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "saved-norms": {
        "r": 4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["input_layernorm", "model.norm"],
    },
    "token-rows": {
        "r": 4,
        "target_modules": ["q_proj"],
        "trainable_token_indices": [7, 3, 200, 299],
    },
    "saved-linears": {
        "r": 4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["layers.0.mlp.up_proj", "layers.1.self_attn"],
    },
    "dora-tables": {
        "r": 6,
        "use_dora": True,
        "target_modules": ["o_proj", "embed_tokens", "lm_head"],
    },
    "added-tokens": {"r": 4, "target_modules": ["q_proj"]},
    "added-tokens-lora": {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "added-tokens-dora": {
        "r": 4,
        "use_dora": True,
        "target_modules": ["q_proj", "embed_tokens", "lm_head"],
    },
    "added-token-rows": {
        "r": 4,
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [312, 7, 311], "lm_head": [311, 312]},
    },
    "added-tokens-saved": {
        "r": 4,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "added-token-rows-on-table": {
        "r": 4,
        "target_modules": ["q_proj"],
        "trainable_token_indices": [312, 7, 311],
    },
    "cut-vocabulary": {"r": 4, "target_modules": ["v_proj"]},
    "tied-lora": {
        "r": 4,
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
    "tied-tables": {
        "r": 4,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "activated": {
        "r": 8,
        "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
        "alora_invocation_tokens": [5, 9, 5],
    },
    "experts": {
        "r": 3,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "experts-down": {
        "r": 5,
        "target_modules": [],
        "target_parameters": ["experts.down_proj", "gate.weight"],
        "rank_pattern": {"gate.weight": 2},
        "alpha_pattern": {"gate.weight": 3},
    },
    "experts-all-linear": {"r": 4, "target_modules": "all-linear"},
    "expert-linears": {"r": 4, "target_modules": ["v_proj", "w1", "w2", "w3"]},
    "delta-nets": {"r": 6, "target_modules": DELTA_NETS},
    "delta-nets-dora": {
        "r": 4,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": [*DELTA_NETS[1:], "q_proj"],
        "modules_to_save": ["linear_attn.norm"],
    },
    "delta-nets-activated": {
        "r": 5,
        "target_modules": [*DELTA_NETS, "down_proj"],
        "alora_invocation_tokens": [5, 9, 5],
    },
}

RESIZED = {
    "added-tokens": 320,
    "added-tokens-lora": 313,
    "added-tokens-dora": 330,
    "added-token-rows": 313,
    "added-tokens-saved": 314,
    "added-token-rows-on-table": 315,
    "cut-vocabulary": 303,
}
"""Features of adapters with a vocabulary of their own, and its size."""

SAVES_TABLES = (
    "added-tokens",
    "added-tokens-saved",
    "added-token-rows-on-table",
    "cut-vocabulary",
)
"""Written as PEFT writes adapters when it finds that the vocabulary has grown."""

TIED_FEATURES = ("tied-lora", "tied-tables")
EXPERT_FEATURES = ("experts", "experts-down", "experts-all-linear", "expert-linears")

LIBRARY_FEATURES = (
    "rank-4-attention",
    "rank-8-all-linear",
    "dora",
    "patterns",
    "lm-head",
    "embedding",
    "token-rows",
    "saved-tables",
    "added-tokens",
    "activated",
    "experts",
    "experts-down",
    "experts-all-linear",
    "expert-linears",
)
"""Features that are proven on bases that run through the transformers library."""

RECURRENT_FEATURES = ("delta-nets", "delta-nets-dora", "delta-nets-activated")
ACTIVATED_FEATURES = ("activated", "delta-nets-activated")
EXPERT_FAMILIES = (
    "afmoe", "axk1", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "gpt_oss",
    "hunyuan_v1_moe", "hy_v3", "kolibri1", "mellum", "mimo_v2_flash", "minimax_m2", "mixtral",
    "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "qwen3_next", "qwen3_vl_moe",
    "solar_open",
)  # fmt: skip
ROUTERS = {
    "gpt_oss": "router.weight",
    "gemma4_text": "router.proj.weight",
    "phimoe": "router.weight",
}
"""Where it is not `gate.weight`."""


def features_of(base: TinyBase) -> list[str]:
    """Features that apply to a base."""
    names = set(FEATURES)
    if not base.is_tied:
        names -= {*TIED_FEATURES}
    if base.is_multimodal:
        names -= {"bias-all"}  # it trains the vision tower's, too
    layer_types = getattr(base.config, "layer_types", None) or ["full_attention"] * 2
    if "linear_attention" not in layer_types:
        names -= {*RECURRENT_FEATURES}
    if layer_types[1] == "linear_attention":
        names -= {"one-layer"}
    if getattr(base.config, "hidden_size_per_layer_input", 0):
        # PEFT does not save the rows that added tokens have in the table of the layers' inputs.
        names -= {name for name, size in RESIZED.items() if size > base.config.vocab_size}
    if not has_experts(base):
        return [name for name in FEATURES if name in names - {*EXPERT_FEATURES}]
    words = ("gate_", "up_", "down_")  # PEFT renames these where experts are fused
    names -= {n for n, f in FEATURES.items() if any(w in str(f["target_modules"]) for w in words)}
    if base.config.model_type == "gpt_oss":
        # PEFT finds no linears in its experts, and takes their biases for ones that it trains.
        names -= {"bias-all", "experts-all-linear", "expert-linears"}
    names -= {"saved-linears"}  # transformers' experts cannot be copied as linears
    return [name for name in FEATURES if name in names]


def of_text_model(fields: dict[str, Any], *, tower_norms: bool) -> dict[str, Any]:
    """The same feature for the text model of a multimodal base alone.

    Args:
        tower_norms: the vision tower has norms of the same names.
    """
    excluded = fields.get("exclude_modules", "")
    towers = (
        r".*(vision_tower|vision_model|visual|multi_modal_projector|embed_vision|vision_embedder).*"
    )
    fields = {**fields, "exclude_modules": f"({excluded})|({towers})" if excluded else towers}
    if "modules_to_save" in fields:
        renamed = {"model.norm": "language_model.norm"}
        if tower_norms:
            renamed["input_layernorm"] = "language_model.layers.0.input_layernorm"
        own = [renamed.get(m, m) for m in fields["modules_to_save"]]
        fields["modules_to_save"] = [
            f"language_model.{m}" if m.startswith("layers.") else m for m in own
        ]
    return fields


def has_experts(base: TinyBase) -> bool:
    """Whether its layers have a mixture of experts."""
    is_family = base.model.config.model_type in EXPERT_FAMILIES
    return is_family or getattr(base.config, "enable_moe_block", False) is True


def feature_config(base: TinyBase, feature: str) -> peft.LoraConfig:
    """The PEFT configuration of a feature on a base."""
    fields = FEATURES[feature]
    if feature == "added-token-rows" and base.is_tied:
        fields = {**fields, "trainable_token_indices": [312, 7, 311]}
    if feature == "expert-linears" and base.model.config.model_type != "mixtral":
        fields = {**fields, "target_modules": ["v_proj", "gate_proj", "up_proj", "down_proj"]}
    router = ROUTERS.get(base.config.model_type)
    if feature == "experts-down" and router is not None:
        fields = {
            **fields,
            "target_parameters": ["experts.down_proj", router],
            "rank_pattern": {router: 2},
            "alpha_pattern": {router: 3},
        }
    if feature == "experts" and base.config.model_type == "gemma4_text":
        fields = {**fields, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    if base.config.model_type == "llama4_text":
        fields = {**fields, "exclude_modules": r".*router"}  # PEFT fails: it returns two tensors
    if base.is_multimodal:
        fields = of_text_model(fields, tower_norms=base.name == "gemma4-multimodal")
    if (
        has_experts(base)
        and fields["target_modules"] == "all-linear"
        and feature not in EXPERT_FEATURES
    ):
        fields = {**fields, "target_modules": ATTENTION}  # PEFT would take experts, too
    fields = with_names_of(base.name, fields)
    return peft.LoraConfig(**{"lora_alpha": 16, "task_type": "CAUSAL_LM", **fields})


def draw(
    model: peft.PeftModel, generator: torch.Generator, *, lora: float = 0.15, other: float = 0.15
) -> None:
    """Give what PEFT trains random values that move the logits, of these deviations."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "lora_magnitude" in name:
            parameter.data *= 1.0 + 0.2 * noise
        elif "lora_" in name:
            parameter.data.copy_(lora * noise)  # in place: PEFT may have tied it to another
        elif parameter.requires_grad:  # biases, saved modules, token rows
            parameter.data += other * noise


def make_adapter(base: TinyBase, feature: str, folder: Path, *, seed: int = 0) -> Path:
    """Train nothing: give every LoRA tensor random values that move the logits, and save."""
    generator = torch.Generator().manual_seed(seed + sum(map(ord, feature)))
    model = peft.get_peft_model(resized(base, feature, generator), feature_config(base, feature))
    draw(model, generator)
    saves_tables = feature in SAVES_TABLES or "auto"
    model.save_pretrained(folder, save_embedding_layers=saves_tables)
    if feature == "expert-linears":
        write_as_linears(base, folder)
    return folder


def adapter_on(base: TinyBase, folder: Path, **fields: object) -> Path:
    """A random adapter on a base, with these fields of its config."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
    model = peft.get_peft_model(copy.deepcopy(base.model), config)
    draw(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return folder


def resized(
    base: TinyBase, feature: str, generator: torch.Generator | None = None
) -> transformers.PreTrainedModel:
    """A copy of the base with the vocabulary of a feature, if it has one; new rows are random."""
    model = copy.deepcopy(base.model)
    if feature not in RESIZED:
        return model
    num_tokens = base.config.vocab_size
    model.resize_token_embeddings(RESIZED[feature], mean_resizing=False)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        new_rows = table.weight.data[num_tokens:]
        noise = torch.randn(new_rows.shape, generator=generator)
        new_rows.copy_(table.weight.data.std() * noise)
        table.weight.requires_grad_(False)
    return model


def write_as_linears(base: TinyBase, folder: Path) -> None:
    """Rewrite an adapter of fused experts as PEFT writes it with transformers 4: an A and a B for
    each linear of each expert."""
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    is_mixtral = base.model.config.model_type == "mixtral"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    written = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            written[name] = tensor
            continue
        container = name.partition(".experts.")[0]
        if is_mixtral:
            container = container.replace(".mlp", ".block_sparse_moe")
        own = names[:2] if ".base_layer." in name else names[2:]
        part = "lora_A" if ".lora_A." in name else "lora_B"
        for i in range(_num_experts(base)):
            for j, linear in enumerate(own):
                key = f"{container}.experts.{i}.{linear}.{part}.weight"
                written[key] = _of_expert(tensor, part, i, j, len(own), base, config["r"])
    save_file(written, folder / "adapter_model.safetensors")
    config |= with_names_of(base.name, {"target_modules": ["v_proj", *names]})
    config |= {"target_parameters": None}
    config |= {"rank_pattern": {}, "alpha_pattern": {}}
    # The names also select dense layers and shared experts, which PEFT left out with experts fused.
    others = {name for name, _ in base.model.named_modules() if name.endswith(names)}
    lacking = [name for name in others if not any(f".{name}." in key for key in written)]
    config |= {"exclude_modules": sorted(lacking) or None}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _num_experts(base: TinyBase) -> int:
    names = ("num_local_experts", "num_experts")
    return next(getattr(base.config, name) for name in names if hasattr(base.config, name))


def _of_expert(
    tensor: torch.Tensor, part: str, index: int, half: int, num_halves: int, base: TinyBase, r: int
) -> torch.Tensor:
    """A linear's share of a stacked tensor; what lies outside of the diagonal is dropped."""
    count = _num_experts(base)
    if part == "lora_A":
        return tensor.view(count, num_halves, r, -1)[index, half].contiguous()
    by_rank = tensor.view(num_halves, -1, num_halves, r, count)
    return by_rank[half, :, half, :, index].contiguous()
