"""The model class of transformers on which PEFT puts an adapter, by the adapter's task.

The modules of a base have other names, or are others, under each class of transformers:

    CAUSAL_LM           *ForCausalLM                   model.layers.0...   lm_head
    SEQ_CLS             *ForSequenceClassification     model.layers.0...   score
    FEATURE_EXTRACTION  *Model                         layers.0...

Multimodal classes, and some classes of transformers 5, have other names for the same modules (see
`text_model`). Geometries are those of `CAUSAL_LM`. PEFT's rules look at names, so an adapter is
checked under the names of its own class, and its modules are renamed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from loraplex.adapter_format.config import AdapterConfig
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.geometry import EMBEDDING, HEAD, LM_HEAD, Geometry, Module
from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, Header, TensorInfo
from loraplex.adapter_format.tasks import FEATURE_EXTRACTION, MAX_LABELS, SCORE, SEQ_CLS
from loraplex.adapter_format.tensor_names import PREFIX
from loraplex.adapter_format.text_model import PLAIN, WRAPPED, Spelling, renamed_by

_BARE = (Spelling("language_model."), PLAIN, Spelling(""))
"""Spellings of a model without a head, as PEFT has it with `FEATURE_EXTRACTION`."""


def spelling_of(config: AdapterConfig, header: Header, geometry: Geometry | None) -> Spelling:
    """How an adapter writes the names of the text model's modules."""
    names = [info.name.removeprefix(PREFIX) for info in header.tensors]
    spellings = (*WRAPPED, *(_BARE if config.task == FEATURE_EXTRACTION else (PLAIN,)))
    found = (s for s in spellings if any(name.startswith(s.body) for name in names))
    names += [f".{name}" for name in config.target_parameters]
    modules = [module.name for module in geometry.modules] if geometry else []
    return replace(next(found, PLAIN), renamed=renamed_by(names, modules))


def geometry_of_task(
    geometry: Geometry, config: AdapterConfig, header: Header, findings: Findings
) -> Geometry:
    """The base as the model class of the task has it, with the names that the adapter uses."""
    spelling, task = spelling_of(config, header, geometry), config.task
    modules = list(geometry.modules)
    is_bare = spelling.body in {bare.body for bare in _BARE} - {PLAIN.body}
    if task == SEQ_CLS or (task == FEATURE_EXTRACTION and is_bare):
        modules = [module for module in modules if module.kind != LM_HEAD]
    if task == SEQ_CLS:
        modules.append(_score(modules, header, findings))
    modules = [replace(module, name=spelling.of(module.name)) for module in modules]
    return replace(geometry, modules=tuple(sorted(modules, key=lambda module: module.name)))


def _score(modules: Iterable[Module], header: Header, findings: Findings) -> Module:
    """The head, with as many labels as the file has rows."""
    info = score_tensor(header)
    num_labels = info.shape[0] if info and info.shape else 0
    if info and not 1 <= num_labels <= MAX_LABELS:
        why = f"must have a row for each label, 1 to {MAX_LABELS}"
        findings.refuse(f"{TENSOR_FILE}:{info.name}", list(info.shape), why)
    widths = [module.out_features for module in modules if module.kind == EMBEDDING]
    return Module(SCORE, HEAD, widths[0] if widths else 0, num_labels, has_bias=False)


def score_tensor(header: Header) -> TensorInfo | None:
    """The weight of the head `[labels, width]`, if the file has one."""
    name = f"{PREFIX}{SCORE}.weight"
    return next((info for info in header.tensors if info.name == name), None)


def in_base(
    modules: Iterable[AdapterModule],
    config: AdapterConfig,
    header: Header,
    geometry: Geometry | None,
) -> tuple[AdapterModule, ...]:
    """The modules under the names that they have in the base's geometry, ordered by them."""
    spelling = spelling_of(config, header, geometry)
    renamed = (replace(module, name=spelling.plain(module.name)) for module in modules)
    return tuple(sorted(renamed, key=lambda module: module.name))


def num_labels_of(modules: Iterable[AdapterModule], task: str) -> int:
    """Number of outputs of the head; 0 without one."""
    shapes = [m.full.shape for m in modules if task == SEQ_CLS and m.name == SCORE and m.full]
    return shapes[0][0] if shapes else 0
