"""The text model within a multimodal checkpoint: its config and the names of its modules.

transformers wraps a text model together with vision or audio towers. The text model's modules then
have longer names, which depend on the version that wrote a file:

    the text model alone             model.layers...                   lm_head
    a wrapper of transformers 5      model.language_model.layers...    lm_head
    a wrapper of transformers 4      language_model.model.layers...    language_model.lm_head

Geometries and workers use the first spelling. Published bases and adapters come in all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from loraplex.errors import InvalidRequest, Unsupported

WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "vipllava": "llama",
}
"""`model_type` of a wrapper -> that of its text model, where `text_config` does not name one."""

_FLAT = frozenset({"qwen2_5_vl", "qwen2_vl"})
"""Wrappers whose published configs have the keys of the text model next to `vision_config`."""

_SAME_TEXT_MODEL = {
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""Text models that compute what another one does: without images, the three position ids of a token
are equal."""

_GEMMA4 = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}

_QWEN2_VL = {
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}

_ABSENT: Mapping[str, Mapping[str, object]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3_vl_moe_text": {"num_key_value_heads": 16, "rope_theta": 500000.0},
    "qwen3_vl_text": {"rope_theta": 500000.0},
}
"""Values of keys that a published `text_config` leaves out: the defaults of transformers' classes.
The configs of Gemma 3 and 4 and LLaVA hold only what differs from them."""

_FIXED: Mapping[str, Mapping[str, object]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Values of keys that a class does not read, where the text model of another type does."""

_CAP_LOGITS = frozenset({"gemma4", "gemma4_unified"})
"""Wrappers that apply the text model's `final_logit_softcapping`. In transformers, a wrapper has a
head of its own, and those of the others do not cap its logits."""

_TOWERS = frozenset(
    """
    audio_model audio_tower connector embed_audio embed_vision multi_modal_projector patch_merger
    vision_adapter vision_embedder vision_encoder vision_language_adapter vision_model vision_tower
    visual
    """.split()
)
"""Parts of module names that only the other parts of a multimodal model have."""


RENAMED = (
    (".mlp.router.", ".block_sparse_moe.gate."),
    (".mlp.gate.", ".mlp.router.gate."),
    (".mlp.shared_experts.", ".mlp.shared_mlp."),
    (".mlp.", ".block_sparse_moe."),
    (".block_sparse_moe.router.", ".block_sparse_moe.router.layer."),
)
"""Names of modules in transformers 5, and their names in the files of some bases; of several that
fit, the first."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a file writes the names of the text model's modules."""

    body: str
    """Prefix of what is `model.` in the text model alone."""
    head: str = ""
    """Prefix of `lm_head`."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Those of `RENAMED` that it has."""

    def of(self, name: str) -> str:
        """A module's name in this spelling."""
        name = _replaced(name, [(old, new) for new, old in self.renamed])
        if name.startswith(PLAIN.body):
            return self.body + name.removeprefix(PLAIN.body)
        return self.head + name if name == "lm_head" else name

    def plain(self, name: str) -> str:
        """The plain name of a module, or of a tensor of one, in this spelling."""
        name = _replaced(name, self.renamed)
        if name.startswith(self.body):
            return PLAIN.body + name.removeprefix(self.body)
        return name.removeprefix(self.head) if name.startswith(f"{self.head}lm_head") else name


def _replaced(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A module's name with the first part that is found replaced."""
    ended = f"{name}."
    for old, new in pairs:
        if old in ended:
            return ended.replace(old, new)[:-1]
    return name


def name_in_files(name: str, base: Container[str]) -> str:
    """A module's name as the base's files spell it, by its name in transformers 5."""
    spelled = (name, *(_replaced(name, [pair]) for pair in RENAMED))
    return next((own for own in spelled if own in base), name)


def renamed_by(tensors: Collection[str], base: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Those of `RENAMED` with which the names of an adapter's tensors differ from those of the
    base's modules."""
    return tuple(
        (new, old)
        for new, old in RENAMED
        if any(new in name and old not in name for name in tensors)
        and any(old in f"{name}." for name in base)
        and not any(new in f"{name}." and old not in f"{name}." for name in base)
    )


FURTHER_TOKENS = "mtp."
"""Begins the names of layers that predict more than the next token. Adapters do not change them."""

PLAIN = Spelling("model.")
_PLAIN_NAMES = ("model.layers.", "model.embed_tokens", "model.norm.", "model.per_layer_")
"""Begin the names of a text model's tensors."""
WRAPPED = (
    Spelling("model.language_model."),
    Spelling("language_model.model.", "language_model."),
)


def is_wrapper(config: Mapping[str, object]) -> bool:
    """Whether a config.json describes a text model together with other towers."""
    return config.get("model_type") in WRAPPERS


def check_wrapper(config: Mapping[str, object]) -> None:
    """Refuse a multimodal base of another type. Raises: Unsupported."""
    if isinstance(config.get("text_config"), dict) and not is_wrapper(config):
        description = f"is a multimodal base that is not served; known: {', '.join(WRAPPERS)}"
        raise Unsupported.field("config.json:model_type", config.get("model_type"), description)


def text_config(config: Mapping[str, object], tensors: Collection[str]) -> dict[str, object]:
    """The config of a wrapper's text model, as config.json of the text model alone would be.

    Args:
        config: config.json of a wrapper.
        tensors: plain names of the text model's tensors; empty = not known.

    Raises:
        InvalidRequest: it has none.
    """
    wrapper = str(config["model_type"])
    inner = config.get("text_config")
    if inner is None and wrapper in _FLAT:
        others = ("model_type", "vision_", "image_", "video_")
        inner = {key: value for key, value in config.items() if not key.startswith(others)}
    if not isinstance(inner, dict):
        description = f"must be an object: the config of the text model in {wrapper!r}"
        raise InvalidRequest.field("config.json:text_config", inner, description)
    model_type = inner.get("model_type") or WRAPPERS[wrapper]
    if not isinstance(model_type, str):
        raise Unsupported.field("config.json:text_config.model_type", model_type, "must be a name")
    given = {key: value for key, value in inner.items() if value is not None}
    fixed = _FIXED.get(model_type, {})
    text = {**_ABSENT.get(model_type, {}), **inner, **given, **fixed}
    text["model_type"] = _SAME_TEXT_MODEL.get(model_type, model_type)
    text["tie_word_embeddings"] = _is_tied(config, inner, tensors)
    if wrapper not in _CAP_LOGITS:
        text["final_logit_softcapping"] = None
    if config.get("quantization_config") is not None:
        text["quantization_config"] = config["quantization_config"]
    return text


def _is_tied(
    config: Mapping[str, object], inner: Mapping[str, object], tensors: Collection[str]
) -> bool:
    """True if tied. As in transformers 5, the wrapper's config takes precedence, and a head in the
    files is used."""
    if "lm_head.weight" in tensors:
        return False
    for source in (config, inner):
        if source.get("tie_word_embeddings") is not None:
            return source["tie_word_embeddings"] is True
    return True


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Plain name -> name in the files, of the text model's tensors in a wrapper's files.

    Raises:
        InvalidRequest: there are none.
    """
    found: dict[str, str] = {}
    others = []
    for name in names:
        plain = _plain(name)
        if plain is None:
            others.append(name)
        else:
            found[plain] = name
    if not found:
        example = min(others, default="no tensor")
        description = "the files hold weights of other towers, but none of the text model"
        raise InvalidRequest.field("model.safetensors", example, description)
    return found


def _plain(tensor: str) -> str | None:
    """The plain name; None if a tensor is not the text model's."""
    for spelling in WRAPPED:
        if tensor.startswith((spelling.body, f"{spelling.head}lm_head.")):
            return spelling.plain(tensor)
    return tensor if tensor.startswith((*_PLAIN_NAMES, FURTHER_TOKENS)) else None


def is_in_tower(module: str) -> bool:
    """Whether a module is a part of a vision or audio tower."""
    return not _TOWERS.isdisjoint(module.split("."))
