"""What PEFT can express and the worker does not serve yet, refused by name.

`modules` checks and describes all of it in the report; only this table stands between that and the
worker. To open a feature, delete its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loraplex.adapter_format.config import CONFIG_FILE, AdapterConfig
from loraplex.adapter_format.experts import is_expert
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.geometry import Module
from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, TensorInfo


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing that is not served."""

    why: str
    """What it is, and the way out."""
    fields: tuple[str, ...] = ()
    """Config fields that are refused when not at their default."""
    parts: tuple[str, ...] = ()
    """Parts of modules (`tensor_names`) that are refused."""
    lora_on: tuple[str, ...] = ()
    """Kinds of modules whose LoRA tensors are refused."""
    use: Callable[[Module, AdapterModule], TensorInfo | None] | None = None
    """Finds the tensor that is refused on a module, if any."""


def _whole_expert(base: Module, module: AdapterModule) -> TensorInfo | None:
    return module.full if is_expert(base.name) else None


UNSERVED: tuple[Feature, ...] = (
    Feature(
        "whole weights of experts are not served; train LoRA on them instead", use=_whole_expert
    ),
    Feature(
        "activated LoRA is not served; train with alora_invocation_tokens=null",
        fields=("alora_invocation_tokens",),
    ),
)

_DEFAULTS = AdapterConfig()


def refuse_unserved_use(base: Module, module: AdapterModule, findings: Findings) -> None:
    """Refuse what is served on other modules or in other sizes, but not on this one."""
    for feature in UNSERVED:
        info = feature.use(base, module) if feature.use else None
        if info:
            findings.refuse(f"{TENSOR_FILE}:{info.name}", list(info.shape), feature.why)


def refuse_unserved_fields(config: AdapterConfig, findings: Findings) -> None:
    """Refuse each field of the table that is not at its default."""
    for feature in UNSERVED:
        for field in feature.fields:
            value = getattr(config, field)
            if value != getattr(_DEFAULTS, field):
                findings.refuse(f"{CONFIG_FILE}:{field}", value, feature.why)


def why_part_is_unserved(part: str) -> str | None:
    """The reason why tensors of a part are refused; None if they are served."""
    return next((feature.why for feature in UNSERVED if part in feature.parts), None)


def why_lora_is_unserved(kind: str) -> str | None:
    """The reason why LoRA on a kind of module is refused; None if it is served."""
    return next((feature.why for feature in UNSERVED if kind in feature.lora_on), None)
