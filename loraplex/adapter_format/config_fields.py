"""The fields of PEFT's LoRA config that do not shape a served adapter, and how each is treated.

Source: peft 0.21, `tuners/lora/config.py` and `config.py`. A field that is missing from all tables
is unknown: harmless at null, false, 0 or empty, else refused, since a newer PEFT may mean anything.
"""

from __future__ import annotations

import re

from loraplex.adapter_format import conversion_field, pooling_fields
from loraplex.adapter_format.config_reader import AdapterConfigReader
from loraplex.adapter_format.tasks import CAUSAL_LM, FEATURE_EXTRACTION, SEQ_CLS

SHAPING = frozenset({
    "alora_invocation_tokens", "alpha_pattern", "base_model_name_or_path", "bias",
    "ensure_weight_tying", "exclude_modules", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_bias", "modules_to_save",
    "peft_type", "peft_version", "r", "rank_pattern", "revision",
    "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_dora",
    "use_rslora",
})  # fmt: skip
"""Fields that `config.parse_config` reads into `AdapterConfig`."""

SERVING = (
    frozenset({"eos_token_id", "rope_scaling", conversion_field.FIELD}) | pooling_fields.FIELDS
)
"""Fields of ours, which PEFT does not know: see `serving_fields`, `pooling_fields` and
`conversion_field`."""

INERT = frozenset({
    "auto_mapping", "fan_in_fan_out", "inference_mode", "lora_dropout", "megatron_core",
    "qalora_group_size",
})  # fmt: skip
"""Fields without effect on a forward pass; PEFT always writes them, whatever their value. It sets
`fan_in_fan_out` by the layers that it finds."""

REFUSED: dict[str, str] = {
    "arrow_config": "Arrow routes between several adapters; publish them one by one",
    "kasa_config": "KaSA changes the base's weights; train a plain LoRA instead",
    "layer_replication": (
        "changes the depth of the base; save the deepened model as a base of its own"
    ),
    "megatron_config": "Megatron layers are not served; save the adapter for Transformers",
    "monteclora_config": "MonteCLoRA samples its weights; train a plain LoRA instead",
    "use_bdlora": "block-diagonal LoRA is not served; train a plain LoRA instead",
    "use_qalora": "QALoRA pools its inputs by groups; train with use_qalora=false",
}
"""Fields that change the mathematics when set, with the reason and the way out."""

TRAINING_ONLY: dict[str, str] = {
    "corda_config": "only matters for initialisation and is ignored",
    "eva_config": "only matters for initialisation and is ignored",
    "loftq_config": "only matters for initialisation and is ignored",
    "lora_ga_config": "only matters for initialisation and is ignored",
    "runtime_config": "is never read from a file, by PEFT either; it is ignored",
    "velora_config": "only matters for the backward pass and is ignored",
}
"""Fields that are warned about when set."""

_HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal"})
_MUTATING_INITS = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga", re.ASCII)
_CONVERT = (
    "changed the base before training, so the adapter is only right on that changed base; convert "
    "it with `registry convert DIR OUT --to peft --initial INITIAL`, INITIAL being the adapter as "
    "saved before training"
)
_LOFTQ = (
    "changed the base before training, which cannot be undone; if that base was saved, serve it "
    "and set init_lora_weights to true, or train without LoftQ, on a quantised base as well"
)
_INPUTS = "trains inputs and no weights, so no LoRA is equivalent to it; train a LoRA"
_OR_MERGE = "or merge it with PEFT (merge_and_unload) and serve the result as a base of its own"
WITHOUT_LORA: dict[str, str] = {
    "ADAPTION_PROMPT": (
        "adds attention to trained prompts, so no LoRA is equivalent to it; train a LoRA"
    ),
    "CARTRIDGE": _INPUTS,
    "CPT": _INPUTS,
    "FROD": (
        "lacks a factor of its weights, which PEFT computes anew from the base, not always with "
        "the same result, so no LoRA is equivalent to it; train a LoRA"
    ),
    "LILY": "weighs its factors anew for each token, so no LoRA is equivalent to it; train a LoRA",
    "LN_TUNING": (
        "trains norms, which are not converted; train a LoRA with the norms in modules_to_save, "
        f"{_OR_MERGE}"
    ),
    "MULTITASK_PROMPT_TUNING": _INPUTS,
    "POLY": (
        "mixes several adapters by the task of a request, so no LoRA is equivalent to it; train "
        "a LoRA for each task"
    ),
    "PREFIX_TUNING": _INPUTS,
    "PROMPT_TUNING": _INPUTS,
    "P_TUNING": _INPUTS,
    "SHADOW": "runs a second model next to the base, so no LoRA is equivalent to it; train a LoRA",
    "TRAINABLE_TOKENS": (
        "trains rows of an embedding, which are not converted; train a LoRA with "
        f"trainable_token_indices, {_OR_MERGE}"
    ),
    "XLORA": (
        "weighs several adapters anew for each token, so no LoRA is equivalent to it; publish "
        "these adapters, which are in its subfolders, one by one"
    ),
}
"""Methods that cannot be converted, with the reason and the way out."""
_SERVED_TASKS = (CAUSAL_LM, SEQ_CLS, FEATURE_EXTRACTION)
_OTHER_TASKS = ("SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS")


def check_peft_type(reader: AdapterConfigReader) -> None:
    """Refuse everything that is not LoRA. Nothing else in such a config has the meaning that we
    know."""
    value = reader.fields.get("peft_type")
    if value is None:
        reader.refuse("peft_type", value, "is missing; save the adapter with PEFT, which writes it")
    elif value != "LORA":
        why = "is not served; convert it with `registry convert DIR OUT --to lora`, if PEFT can"
        reader.refuse("peft_type", value, WITHOUT_LORA.get(str(value), why))


def check_tables(reader: AdapterConfigReader) -> None:
    """Decide about every field that no getter reads."""
    for field, value in reader.fields.items():
        if field in SHAPING or field in SERVING or field in INERT:
            continue
        if field in REFUSED:
            if not _is_off(value):
                reader.refuse(field, value, REFUSED[field])
        elif field in TRAINING_ONLY:
            if not _is_off(value):
                reader.warn(field, value, TRAINING_ONLY[field])
        else:
            _check_unknown(reader, field, value)


def _is_off(value: object) -> bool:
    """Whether a value turns its feature off. 0 is not false: a value of a wrong type never does."""
    return value is None or value is False or value in ([], {})


def _check_unknown(reader: AdapterConfigReader, field: str, value: object) -> None:
    if value is None or value is False or value in ("", [], {}, 0):
        reader.warn(field, value, "is unknown, but off; it is ignored")
    else:
        hint = "is unknown to PEFT 0.21; if it has no effect on inference, remove it"
        reader.refuse(field, value, hint)


def check_init(reader: AdapterConfigReader) -> None:
    """Refuse initialisations that moved a part of the base into the adapter."""
    value = reader.fields.get("init_lora_weights", True)
    if isinstance(value, bool):
        return
    if not isinstance(value, str):
        reader.refuse("init_lora_weights", value, "must be a boolean or a string")
    elif _MUTATING_INITS.fullmatch(value):
        reader.refuse("init_lora_weights", value, _CONVERT)
    elif value == "loftq":
        reader.refuse("init_lora_weights", value, _LOFTQ)
    elif value == "mica":
        reader.warn("init_lora_weights", value, "is served as a plain LoRA, which it is by now")
    elif value.lower() not in _HARMLESS_INITS:
        reader.refuse("init_lora_weights", value, "is not an initialisation that PEFT 0.21 knows")


def check_task(reader: AdapterConfigReader) -> None:
    """Refuse tasks other than those of decoders with at most one vector of outputs for a prompt."""
    value = reader.fields.get("task_type")
    if value is None or value in _SERVED_TASKS:
        return
    served = ", ".join(_SERVED_TASKS)
    if value in _OTHER_TASKS:
        reader.refuse("task_type", value, f"is not served; served are {served}")
    else:
        reader.refuse("task_type", value, f"is not a task that PEFT knows; use {served} or null")


def check_combinations(reader: AdapterConfigReader) -> None:
    """Refuse what PEFT itself refuses when it reads the config."""
    fields = reader.fields
    targets = fields.get("target_modules")
    if isinstance(targets, str):
        for name in ("layers_to_transform", "layers_pattern"):
            if fields.get(name) is not None:
                reader.refuse(name, fields[name], "needs target_modules to be a list of names")
    if fields.get("layers_pattern") and fields.get("layers_to_transform") is None:
        reader.refuse("layers_pattern", fields["layers_pattern"], "needs layers_to_transform too")
    if targets in ([], "") and not fields.get("target_parameters"):
        reader.refuse(
            "target_modules", targets, "is empty, so no module would be adapted; name at least one"
        )
    if fields.get("lora_bias") is True and fields.get("use_dora") is True:
        reader.refuse(
            "lora_bias", True, "cannot be combined with use_dora, which PEFT refuses as well"
        )
    if fields.get("alora_invocation_tokens"):
        _check_activated(reader)
    if fields.get("target_parameters"):
        for name in ("use_dora", "lora_bias"):
            if fields.get(name) is True:
                reader.refuse(
                    name,
                    True,
                    "cannot be combined with target_parameters, which PEFT refuses as well",
                )
    if fields.get("lora_bias") is True and isinstance(fields.get("init_lora_weights"), str):
        reader.refuse("lora_bias", True, "needs init_lora_weights to be true or false")


def _check_activated(reader: AdapterConfigReader) -> None:
    """Refuse what an activated LoRA cannot be combined with."""
    fields = reader.fields
    if fields.get("task_type") in (SEQ_CLS, FEATURE_EXTRACTION):
        hint = "has no invocation: PEFT serves activated LoRA for CAUSAL_LM only"
        reader.refuse("task_type", fields["task_type"], hint)
    for name in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters"):
        if fields.get(name):
            hint = "acts on whole requests, but an activated LoRA only from its invocation on"
            reader.refuse(name, fields[name], hint)
    if fields.get("bias", "none") != "none":
        reader.refuse("bias", fields["bias"], "cannot be combined with alora_invocation_tokens")
