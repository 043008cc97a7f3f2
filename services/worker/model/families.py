"""The table of model families: which file serves which `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapter_format.geometry import quantisation_of
from loraplex.adapter_format.text_model import WRAPPERS, is_wrapper, plain_names, text_config
from loraplex.errors import Unsupported
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model import (
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
    llama,
    ministral3,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen_moe,
)
from loraplex_services.worker.model.build import Builder, LayerNames
from loraplex_services.worker.model.config_reader import (
    ModelConfigReader,
    eos_token_ids,
    read_json_object,
)
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.model.load import Weights, tensor_names
from loraplex_services.worker.types.model_config import ModelConfig

_USUAL_NAMES = LayerNames()
_LIBRARY_WRAPPERS = frozenset({"llama4"})
"""Multimodal bases whose text model runs through the transformers library only."""


@dataclass(frozen=True, slots=True)
class Family:
    """How to read a config and build a model."""

    read_config: Callable[[ModelConfigReader, tuple[int, ...]], ModelConfig]
    names: LayerNames = _USUAL_NAMES
    assemble: Callable[[Builder], Decoder] = Builder.build
    """Builds the decoder. A family whose layers are not made of attention and one dense MLP has a
    function of its own."""

    def build(self, config: ModelConfig, weights: Weights, operators: Operators) -> Decoder:
        """The model with its weights."""
        return self.assemble(Builder(config, weights, operators, self.names))


FAMILIES = {
    "gemma2": Family(gemma2.read_config, gemma2.NAMES),
    "gemma3_text": Family(gemma3.read_config, gemma2.NAMES),
    "gemma4_text": Family(gemma4.read_config, assemble=gemma4.assemble),
    "gemma4_unified_text": Family(gemma4.read_unified_config, assemble=gemma4.assemble),
    "gpt_oss": Family(gpt_oss.read_config, assemble=gpt_oss.assemble),
    "llama": Family(llama.read_config),
    "ministral3": Family(ministral3.read_config),
    "mistral": Family(mistral.read_config),
    "mixtral": Family(mixtral.read_config, assemble=mixtral.assemble),
    "phi3": Family(phi3.read_config, phi3.NAMES),
    "qwen2": Family(qwen2.read_config),
    "qwen2_moe": Family(qwen_moe.read_qwen2_config, assemble=qwen_moe.assemble),
    "qwen3": Family(qwen3.read_config),
    "qwen3_5_moe_text": Family(qwen3_5.read_moe_config, assemble=qwen3_5.assemble),
    "qwen3_5_text": Family(qwen3_5.read_config, assemble=qwen3_5.assemble),
    "qwen3_moe": Family(qwen_moe.read_qwen3_config, assemble=qwen_moe.assemble),
    "qwen3_next": Family(qwen3_5.read_next_config, assemble=qwen3_5.assemble),
}
"""The families by `model_type`."""


def has_family(folder: Path) -> bool:
    """Whether one of the families here serves a base.

    Raises:
        InvalidRequest: config.json is missing or damaged.
    """
    raw = read_json_object(folder / "config.json")
    return raw.get("model_type") in {*FAMILIES, *WRAPPERS} - _LIBRARY_WRAPPERS


def read_model_config(folder: Path) -> tuple[Family, ModelConfig]:
    """Read `config.json`.

    Raises:
        Unsupported: naming the family or field that this build does not serve.
        InvalidRequest: when the file is damaged.
    """
    raw, field = read_json_object(folder / "config.json"), "config.json:"
    if is_wrapper(raw):
        names = tensor_names(folder)
        raw, field = text_config(raw, plain_names(names) if names else ()), f"{field}text_config."
    model_type = raw.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = ", ".join(sorted({*FAMILIES, *WRAPPERS} - _LIBRARY_WRAPPERS))
        description = f"is not served by this build; known: {known}"
        raise Unsupported.field(f"{field}model_type", model_type, description)
    quantisation_of(raw)
    handled = {"model_type", "quantization_config"}
    reader = ModelConfigReader({k: v for k, v in raw.items() if k not in handled}, field)
    config = family.read_config(reader, eos_token_ids(folder))
    reader.finish()
    return family, config
