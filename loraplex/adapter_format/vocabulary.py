"""Tables of token embeddings: checks that an adapter's embedding and head fit each other.

An adapter may bring a table of another length than the base's (tokens added, or a padded table cut
to the tokenizer's length); then embedding and head must agree, since a token must be both readable
and writable. Where the base ties the two, what PEFT loads into the one shared weight counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loraplex.adapter_format.config import CONFIG_FILE, AdapterConfig
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.geometry import EMBEDDING, LM_HEAD, Geometry
from loraplex.adapter_format.module_parts import saves
from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, TensorInfo
from loraplex.adapter_format.tasks import CAUSAL_LM

MAX_ADDED_TOKENS = 65_536
"""Most tokens beyond the base's table."""


def complete_tables(
    modules: Sequence[AdapterModule],
    geometry: Geometry,
    config: AdapterConfig,
    findings: Findings,
    *,
    brings_tokenizer: bool,
) -> tuple[AdapterModule, ...]:
    """The modules, ordered by name, with what a tied pair of tables shares, and `num_rows` where
    the adapter's tables have another length than the base's."""
    names = {m.kind: m.name for m in geometry.modules if m.kind in (EMBEDDING, LM_HEAD)}
    if EMBEDDING not in names or (LM_HEAD not in names and config.task == CAUSAL_LM):
        return tuple(modules)
    by_name = {module.name: module for module in modules}
    embedding = by_name.get(names[EMBEDDING], AdapterModule(names[EMBEDDING]))
    tables = [embedding]
    if LM_HEAD in names:  # other model classes read tokens only
        head = by_name.get(names[LM_HEAD], AdapterModule(names[LM_HEAD]))
        if geometry.tied_embeddings:
            shared = _tied(embedding, head, config, tokens=False)
            head, embedding = _tied(head, embedding, config), shared
            if head.token_delta and any(m.kind == LM_HEAD and m.has_bias for m in geometry.modules):
                why = (
                    "trains rows that the head shares with the embedding, and PEFT then leaves out "
                    "the head's bias; save both tables with modules_to_save instead"
                )
                findings.refuse(f"{CONFIG_FILE}:trainable_token_indices", list(head.token_ids), why)
        tables = [embedding, head]
    size = _common_size(tables, geometry.vocab_size, findings)
    if size > geometry.vocab_size:
        where, num_new = f"{TENSOR_FILE}:{names[EMBEDDING]}", size - geometry.vocab_size
        _check_new_tokens(where, num_new, geometry, findings, brings_tokenizer)
    for module in tables:
        if _is_changed(module) or module.name in by_name or size != geometry.vocab_size:
            own = size if size != geometry.vocab_size else 0
            by_name[module.name] = replace(module, num_rows=own)
    return tuple(by_name[name] for name in sorted(by_name))


def _check_new_tokens(
    where: str, num_new: int, geometry: Geometry, findings: Findings, brings_tokenizer: bool
) -> None:
    """Refuse tokens that the base has no layer inputs for; warn if no tokenizer makes them."""
    if geometry.has_layer_inputs:
        why = (
            "adds tokens, for which the base's per-layer embeddings have no rows, and libraries do "
            "not save any with an adapter; train without new tokens"
        )
        findings.refuse(where, num_new, why)
    if not brings_tokenizer:
        findings.warn(
            where,
            num_new,
            "adds tokens without a tokenizer, so text is tokenized as for the base; save the "
            "tokenizer with the adapter, or send prompts that use them as token ids",
        )


def _is_changed(module: AdapterModule) -> bool:
    return any((module.full, module.base_copy, module.token_delta))


def _tied(
    module: AdapterModule, other: AdapterModule, config: AdapterConfig, *, tokens: bool = True
) -> AdapterModule:
    """`module` with what `other` brings into the weight that both share.

    A table in modules_to_save is a copy of its own, and unties the two. Single rows are trained in
    the embedding and used by both.
    """
    if tokens and other.token_delta and not (module.token_delta or module.full):
        return replace(
            module,
            token_delta=other.token_delta,
            token_ids=other.token_ids,
            base_copy=module.base_copy or other.base_copy,
        )
    table = other.base_copy
    if table is None and not saves(config, other.name):
        table = other.full
    if table is None or _is_changed(module):
        return module
    return replace(module, base_copy=table)


def _common_size(tables: Sequence[AdapterModule], base_size: int, findings: Findings) -> int:
    """Number of rows of embedding and head, if there are any. Refused if they differ."""
    sizes = [_size(module, base_size, findings) for module in tables]
    if sizes[0] != sizes[-1]:
        longer = tables[0] if sizes[0] != base_size else tables[1]
        info = longer.full or longer.base_copy or longer.token_delta
        assert info is not None, longer
        findings.refuse(
            f"{TENSOR_FILE}:{info.name}",
            list(info.shape),
            f"resizes the vocabulary: embedding {sizes[0]} and head {sizes[1]} tokens must agree; "
            "save the adapter with save_embedding_layers=True, or train both tables",
        )
    if not sizes[0]:
        why = "has no rows, so there is no token to read or write; save the adapter again"
        findings.refuse(f"{TENSOR_FILE}:{tables[0].name}", sizes[0], why)
    if sizes[0] > base_size + MAX_ADDED_TOKENS:
        why = f"adds more than the {MAX_ADDED_TOKENS} tokens that are served beyond the base's"
        findings.refuse(f"{TENSOR_FILE}:{tables[0].name}", sizes[0], why)
    return sizes[0]


def _size(module: AdapterModule, base_size: int, findings: Findings) -> int:
    table = module.full or module.base_copy
    size = table.shape[0] if table else base_size
    added = sorted(token_id for token_id in module.token_ids if token_id >= size)
    if not added or module.token_delta is None:
        return size
    if added != list(range(size, size + len(added))):
        _refuse_gap(module.token_delta, size, findings)
    return size + len(added)


def _refuse_gap(info: TensorInfo, size: int, findings: Findings) -> None:
    why = (
        f"trains tokens beyond the base's {size} rows but not all from {size} on, so rows are "
        "missing; train all added tokens, or save the resized tables"
    )
    findings.refuse(f"{TENSOR_FILE}:{info.name}", list(info.shape), why)
