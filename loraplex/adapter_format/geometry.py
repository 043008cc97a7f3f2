"""The shape of a base model: every module that LoRA can change, read without loading weights.

Only `config.json` and the headers of the safetensors files are read, so this takes milliseconds
and needs no framework. Nothing here knows a model family: modules are what the files contain. Of a
multimodal base it is the text model's shape.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loraplex.adapter_format.base_types import TIED_TYPES
from loraplex.adapter_format.quantisation import Quantisation, read_quantisation
from loraplex.adapter_format.quantised_tensors import logical_tensors
from loraplex.adapter_format.safetensors_header import (
    DTYPE_BYTES,
    TensorInfo,
    parse_header,
    read_prefix,
)
from loraplex.adapter_format.strict_json import read_object
from loraplex.adapter_format.text_model import (
    FURTHER_TOKENS,
    check_wrapper,
    is_wrapper,
    plain_names,
    text_config,
)
from loraplex.errors import InvalidAdapter, InvalidRequest, Unsupported
from loraplex.units import counted

LINEAR = "linear"
EMBEDDING = "embedding"
LM_HEAD = "lm_head"
NORM = "norm"
HEAD = "head"
"""A head that only adapters bring: no base has one (see `tasks`)."""

MAX_CONFIG_BYTES = 1024 * 1024
MAX_INDEX_BYTES = 64 * 1024 * 1024

_EMBEDDING_NAMES = frozenset({"embed_tokens", "wte", "word_embeddings", "embed_in"})
_LAYER_INPUTS = "model.embed_tokens_per_layer.weight"
"""A table with a row for each token that layers read. Adapters cannot train it."""
_LAYER_PROJECTION = "model.per_layer_model_projection"
_LM_HEAD_NAMES = frozenset({"lm_head", "embed_out"})
_GPT2 = "gpt2"
_TRANSPOSED = frozenset({"c_attn", "c_fc", "c_proj"})
"""Modules of GPT-2 whose weights are `[in, out]` (transformers' Conv1D)."""

_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
"""Keys of the number of layers, by family."""

IDENTITY_KEYS = (
    "activation", "activation_function", "alibi", "attention_bias", "attention_chunk_size",
    "attention_multiplier", "attention_value_scale", "attn_logit_softcapping", "attn_scale",
    "attn_temperature_tuning", "bias", "clip_qkv", "dim_model_base", "embedding_multiplier",
    "ffn_hidden_size", "final_logit_softcapping", "floor_scale", "head_dim", "hidden_act",
    "hidden_activation", "hidden_size", "interleave_moe_layer_step", "intermediate_size",
    "intermediate_size_mlp", "layer_norm_eps", "layer_rope_theta", "layer_types",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_value_head_dim", "logits_scaling", "mlp_bias",
    "model_type", "moe_intermediate_size", "moe_k", "moe_layers", "moe_topk", "multi_query",
    "mup_enabled", "n_embd", "n_group", "n_head", "n_inner", "n_layer",
    "new_decoder_architecture", "no_rope_layer_interval", "no_rope_layers", "norm_topk_prob",
    "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers",
    "num_key_value_heads", "num_kv_heads", "num_kv_shared_layers", "num_ln_in_parallel_attn",
    "num_local_experts", "original_max_position_embeddings", "parallel_attn",
    "partial_rotary_factor", "position_embedding_type", "query_pre_attn_scalar",
    "residual_multiplier", "rms_norm_eps", "rope_interleave", "rope_local_base_freq",
    "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "route_scale",
    "routed_scaling_factor", "router_scaling_factor", "scale_depth", "scale_emb",
    "scoring_func", "sliding_window", "sliding_window_pattern", "swiglu_alpha", "swiglu_limit",
    "tie_word_embeddings", "top_k_experts", "topk_group", "topk_method", "use_qk_norm",
    "use_sliding_window", "vocab_size",
)  # fmt: skip
"""Keys of config.json that change what the weights compute. Names, dtypes, token ids and library
versions are left out: they differ between copies of one model."""


@dataclass(frozen=True, slots=True)
class Module:
    """One weight module of a base."""

    name: str
    """Full Hugging Face name, such as `model.layers.0.self_attn.q_proj`."""
    kind: str
    """`linear`, `embedding`, `lm_head` or `norm`; `head` next to an adapter that has one."""
    in_features: int
    """Columns of the weight (embedding: rows of its table, norm: its width)."""
    out_features: int
    """Rows of the weight (embedding and norm: width)."""
    has_bias: bool
    is_fixed: bool = False
    """Whether the workers that serve the base are unable to adapt it."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a base, against which adapters are checked."""

    model_type: str
    fingerprint: str
    """`sha256:...` of the canonical config and the tensor table."""
    num_layers: int
    vocab_size: int
    tied_embeddings: bool
    modules: tuple[Module, ...]
    """Ordered by name."""
    rotary_pairs: int = 0
    """Number of rotated pairs in a head; 0 = not known."""

    @property
    def has_layer_inputs(self) -> bool:
        """Whether each token has a row in another table, which adapters do not save."""
        return any(module.name == _LAYER_PROJECTION for module in self.modules)


def geometry_from_folder(path: Path) -> Geometry:
    """Read a base in Hugging Face layout.

    Args:
        path: folder with `config.json` and `model.safetensors`, or shards with their index.

    Raises:
        InvalidRequest: naming the file or the config key that is missing or wrong.
    """
    try:
        config = _read_json(path / "config.json", MAX_CONFIG_BYTES)
        quantisation = quantisation_of(config)
        tensors = _logical_tensors(path, quantisation)
        check_wrapper(config)
        if is_wrapper(config):
            tensors = {plain: tensors[name] for plain, name in plain_names(tensors).items()}
            config = text_config(config, tensors)
    except (InvalidAdapter, Unsupported) as error:
        raise InvalidRequest(error.message, violations=error.violations) from error
    tensors = {name: t for name, t in tensors.items() if not name.startswith(FURTHER_TOKENS)}
    model_type = config.get("model_type")
    if model_type == _GPT2:
        tensors = _of_gpt2(tensors)
    tied = config.get("tie_word_embeddings", _tied_by_default(model_type, tensors)) is True
    modules = _modules(tensors, tied, model_type)
    return Geometry(
        model_type=_string(config, "model_type"),
        fingerprint=_fingerprint(config, modules, quantisation),
        num_layers=_size(config, next((k for k in _NUM_LAYERS if k in config), _NUM_LAYERS[0])),
        vocab_size=_vocab_size(modules, config),
        tied_embeddings=tied,
        modules=modules,
        rotary_pairs=_rotary_pairs(config, modules),
    )


def _read_json(path: Path, max_bytes: int) -> dict[str, object]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise InvalidRequest.field(path.name, str(path), f"{problem}; a base needs it") from error
    return read_object(raw, path.name, max_bytes)


def quantisation_of(config: Mapping[str, object]) -> Quantisation | None:
    """How linears are stored; None if they are plain, as with gpt-oss's experts in MXFP4.

    Raises:
        Unsupported: naming what this build does not know.
    """
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if config.get("model_type") == "gpt_oss" and method == "mxfp4":
        return None
    return read_quantisation(config)


def _logical_tensors(path: Path, quantisation: Quantisation | None) -> dict[str, TensorInfo]:
    """All tensors of all files, by name; a quantised linear's weight is one matrix."""
    table = _tensor_table(path)

    def read(info: TensorInfo) -> bytes:
        with table[info.name][0].open("rb") as file:
            file.seek(info.begin)
            return file.read(info.num_bytes)

    tensors = {name: info for name, (_, info) in table.items()}
    return logical_tensors(tensors, quantisation, read)


def _tensor_table(path: Path) -> dict[str, tuple[Path, TensorInfo]]:
    """All tensors of all files, by name, with their files."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        refuse_pickled(path)
        return _read_tensors(path / "model.safetensors")
    weight_map = _read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidRequest.field(f"{index.name}:weight_map", weight_map, "must be an object")
    table: dict[str, tuple[Path, TensorInfo]] = {}
    for name in sorted({str(file) for file in weight_map.values()}):
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise InvalidRequest.field(f"{index.name}:weight_map", name, "is not a shard's name")
        table.update(_read_tensors(path / name))
    missing = sorted(set(weight_map) - set(table))
    if missing:
        description = (
            f"the shards lack {counted(len(missing), 'tensor')} of the index; fetch the base again"
        )
        raise InvalidRequest.field(f"{index.name}:weight_map", missing[0], description)
    return table


def refuse_pickled(folder: Path) -> None:
    """Raises InvalidRequest for a base whose only weights are pickles, which can run code."""
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if pickles and not (folder / "model.safetensors").exists():
        description = (
            "may run code when it is read, so it is not; save the base as safetensors "
            "(transformers' save_pretrained does)"
        )
        raise InvalidRequest.field(pickles[0].name, str(pickles[0]), description)


def _read_tensors(path: Path) -> dict[str, tuple[Path, TensorInfo]]:
    try:
        file_size = path.stat().st_size
        prefix = read_prefix(path, path.name)
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise InvalidRequest.field(path.name, str(path), f"{problem}; a base needs it") from error
    header = parse_header(prefix, file_size, source=path.name, dtypes=DTYPE_BYTES)
    return {info.name: (path, info) for info in header.tensors}


def _of_gpt2(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors in the form of other families: named as in the model, weights `[out, in]`."""
    named = {}
    for name, info in tensors.items():
        if _last_part(_module_of(name)) in _TRANSPOSED and name.endswith(".weight"):
            info = replace(info, shape=info.shape[::-1])
        is_bare = not name.startswith(("transformer.", "lm_head."))  # as in the oldest files
        named[f"transformer.{name}" if is_bare else name] = info
    return named


def _tied_by_default(model_type: object, tensors: dict[str, TensorInfo]) -> bool:
    """Whether the head is shared where the config does not say: a missing one is, in any family."""
    has_head = any(_last_part(_module_of(name)) in _LM_HEAD_NAMES for name in tensors)
    return model_type in TIED_TYPES or not has_head


def _modules(tensors: dict[str, TensorInfo], tied: bool, model_type: object) -> tuple[Module, ...]:
    modules = {}
    for name, info in tensors.items():
        if name.endswith(".weight") and len(info.shape) in (1, 2) and name != _LAYER_INPUTS:
            own = _module_of(name)
            module = _module(own, info.shape, f"{own}.bias" in tensors)
            modules[module.name] = module
    embeddings = [m for m in modules.values() if m.kind == EMBEDDING]
    hidden_size = embeddings[0].out_features if embeddings else 0
    for module in _stacked_experts(tensors, model_type, hidden_size):
        modules[module.name] = module
    heads = [m for m in modules.values() if m.kind == LM_HEAD]
    if tied and embeddings and not heads:
        rows, width = embeddings[0].in_features, embeddings[0].out_features
        modules["lm_head"] = Module("lm_head", LM_HEAD, width, rows, "lm_head.bias" in tensors)
    return tuple(modules[name] for name in sorted(modules))


def _stacked_experts(
    tensors: dict[str, TensorInfo], model_type: object, hidden_size: int
) -> Iterator[Module]:
    """The modules of experts whose weights are one tensor for each projection of a layer.

    It is `[experts, out, in]`, with the outputs of all gates before those of the up projections, so
    that the modules are the linears that other files hold. In Llama 4 and published Qwen 3 VL it is
    `[experts, in, out]`. In gpt-oss, too, with the two interleaved; or, in four bits, `_blocks` of
    `[experts, out, in / 32, 16]`.
    """
    for name, info in tensors.items():
        stacked = name.removesuffix("_blocks")
        container, _, projection = stacked.rpartition(".")
        if projection not in ("gate_up_proj", "down_proj") or not container.endswith(".experts"):
            continue
        names = [projection]
        if name != stacked and len(info.shape) == 4:
            num_experts, out_features, groups, pairs = info.shape
            in_features = groups * pairs * 2
        elif len(info.shape) != 3:
            continue
        else:
            num_experts, out_features, in_features = info.shape
            if hidden_size != (in_features if projection == "gate_up_proj" else out_features):
                in_features, out_features = out_features, in_features
        if projection == "gate_up_proj" and model_type != "gpt_oss":
            names, out_features = ["gate_proj", "up_proj"], out_features // 2
        has_bias = f"{stacked}_bias" in tensors
        for expert in range(num_experts):
            for own in names:
                module = f"{container}.{expert}.{own}"
                yield Module(module, LINEAR, in_features, out_features, has_bias)


def _module(name: str, shape: tuple[int, ...], has_bias: bool) -> Module:
    if len(shape) == 1:
        return Module(name, NORM, shape[0], shape[0], has_bias)
    kind = kind_of_matrix(name)
    rows, columns = shape
    if kind == EMBEDDING:
        return Module(name, kind, rows, columns, has_bias)
    return Module(name, kind, columns, rows, has_bias)


def kind_of_matrix(module: str) -> str:
    """The kind of a module with a two-dimensional weight, by the last part of its name."""
    last = _last_part(module)
    if last in _EMBEDDING_NAMES:
        return EMBEDDING
    return LM_HEAD if last in _LM_HEAD_NAMES else LINEAR


def _module_of(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _last_part(module: str) -> str:
    return module.rpartition(".")[2]


def _vocab_size(modules: tuple[Module, ...], config: dict[str, object]) -> int:
    """Number of rows of the embedding. Padded tables may have more than the config says."""
    for module in modules:
        if module.kind == EMBEDDING:
            return module.in_features
    return _size(config, "vocab_size")


def _rotary_pairs(config: dict[str, object], modules: tuple[Module, ...]) -> int:
    """Number of rotary pairs. The width of a head is that of the inputs of `o_proj` over the query
    heads, because families have defaults of their own for `head_dim` and for the number of key
    heads. Heads of latent attention, which lack `k_proj`, have parts of different widths."""
    heads, part = config.get("num_attention_heads"), config.get("partial_rotary_factor")
    for key in ("rope_scaling", "rope_parameters"):
        params = config.get(key)
        if isinstance(params, dict) and params.get("partial_rotary_factor") is not None:
            part = params["partial_rotary_factor"]
    part = 1.0 if part is None else part
    if type(heads) is not int or heads <= 0 or type(part) not in (int, float):
        return 0
    linears = {_last_part(m.name): m for m in reversed(modules) if m.kind == LINEAR}
    if "o_proj" not in linears or linears.keys().isdisjoint(("k_proj", "qkv_proj")):
        return 0
    return int(linears["o_proj"].in_features // heads * float(str(part))) // 2


def _fingerprint(
    config: dict[str, object], modules: tuple[Module, ...], quantisation: Quantisation | None
) -> str:
    identity: dict[str, object] = {
        "config": {key: config[key] for key in IDENTITY_KEYS if config.get(key) is not None},
        "modules": [[m.name, m.kind, m.in_features, m.out_features, m.has_bias] for m in modules],
    }
    if quantisation is not None:
        identity["quantisation"] = quantisation.name
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _string(config: dict[str, object], key: str) -> str:
    value = config.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequest.field(f"config.json:{key}", value, "must be a non-empty string")
    return value


def _size(config: dict[str, object], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise InvalidRequest.field(f"config.json:{key}", value, "must be a positive integer")
    return value
