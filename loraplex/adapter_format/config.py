"""Parses `adapter_config.json`: every field that PEFT can write is served, ignored or refused.

Three outcomes: the field shapes the adapter and is in `AdapterConfig`; it changes the mathematics
in a way that is not served and is refused; or it is harmless and at most warned about. The last two
are tables in `config_fields`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from loraplex.adapter_format import config_fields
from loraplex.adapter_format.config_reader import AdapterConfigReader, is_index_list
from loraplex.adapter_format.conversion_field import check_conversion
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.patterns import Names
from loraplex.adapter_format.pooling_fields import PoolingFields, read_pooling
from loraplex.adapter_format.rope_scaling import RopeScaling
from loraplex.adapter_format.serving_fields import read_eos_token_ids, read_rope_scaling
from loraplex.adapter_format.strict_json import read_object
from loraplex.adapter_format.tasks import CAUSAL_LM, SAVED_HEADS, SEQ_CLS
from loraplex.errors import Violation

THE_EMBEDDING = "embed_tokens"
"""The short form of PEFT for the embedding in `trainable_token_indices`, whatever the embedding's
name is."""
CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1024 * 1024

MAX_ALPHA = 1e6
"""Largest absolute value of `lora_alpha` and of the values of `alpha_pattern`. Adapters in use have
1 to 1,000."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A PEFT LoRA config, checked. Defaults are PEFT's."""

    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    """(pattern, rank) in the file's order: the first match wins."""
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    """(pattern, alpha) in the file's order: the first match wins."""
    target_modules: Names | None = None
    """None = the default for the base's model_type."""
    exclude_modules: Names = ()
    layers_to_transform: tuple[int, ...] = ()
    """Empty = all layers."""
    layers_pattern: tuple[str, ...] = ()
    bias: str = "none"
    """`none`, `all` or `lora_only`."""
    lora_bias: bool = False
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(embedding module, token ids in the order of the trained rows), sorted by module; a plain
    list in the file means `embed_tokens`."""
    target_parameters: tuple[str, ...] = ()
    alora_invocation_tokens: tuple[int, ...] | None = None
    task: str = CAUSAL_LM
    """One of `tasks`; null in the file means `CAUSAL_LM`."""
    pooling: PoolingFields = field(default_factory=PoolingFields)
    ensure_weight_tying: bool = False
    """Whether training of a tied embedding trains the head as well."""
    init_is_random: bool = False
    """Whether `init_lora_weights` is false: a selected module without tensors would be random in
    PEFT."""
    rope_scaling: RopeScaling | None = None
    """A rotary embedding of the adapter's own, for which PEFT has no field."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end its output, sorted; empty = the base's."""
    base_model_name_or_path: str | None = None
    revision: str | None = None
    peft_version: str | None = None
    warnings: tuple[Violation, ...] = ()


def parse_config(raw: bytes) -> AdapterConfig:
    """Read a config and decide about every field.

    Args:
        raw: bytes of `adapter_config.json`.

    Raises:
        InvalidAdapter: one violation per bad field, with path `adapter_config.json:<field>`.
    """
    findings = Findings()
    fields = read_object(raw, CONFIG_FILE, MAX_CONFIG_BYTES)
    reader = AdapterConfigReader(fields, findings, CONFIG_FILE)
    config_fields.check_peft_type(reader)
    findings.raise_if_refused()
    config_fields.check_tables(reader)
    config_fields.check_init(reader)
    config_fields.check_task(reader)
    config_fields.check_combinations(reader)
    check_conversion(reader)
    values = _read_values(reader)
    findings.raise_if_refused()
    return values


def _read_values(reader: AdapterConfigReader) -> AdapterConfig:
    return AdapterConfig(
        r=reader.rank("r", 8),
        lora_alpha=_alpha(reader),
        use_rslora=reader.flag("use_rslora"),
        use_dora=reader.flag("use_dora"),
        rank_pattern=reader.ranks_by_pattern("rank_pattern"),
        alpha_pattern=_alpha_pattern(reader),
        target_modules=reader.names("target_modules"),
        exclude_modules=reader.names("exclude_modules") or (),
        layers_to_transform=reader.indices("layers_to_transform"),
        layers_pattern=reader.plain_names("layers_pattern"),
        bias=_bias(reader),
        lora_bias=reader.flag("lora_bias"),
        modules_to_save=_modules_to_save(reader),
        trainable_token_indices=_token_indices(reader),
        target_parameters=_target_parameters(reader),
        alora_invocation_tokens=_invocation_tokens(reader),
        task=reader.text("task_type") or CAUSAL_LM,
        pooling=read_pooling(reader),
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
        rope_scaling=read_rope_scaling(reader),
        eos_token_ids=read_eos_token_ids(reader),
        init_is_random=reader.fields.get("init_lora_weights") is False,
        base_model_name_or_path=reader.text("base_model_name_or_path"),
        revision=reader.text("revision"),
        peft_version=reader.text("peft_version"),
        warnings=tuple(reader.findings.warnings),
    )


def _alpha(reader: AdapterConfigReader) -> float:
    alpha = reader.number("lora_alpha", 8.0)
    _check_alpha(reader, "lora_alpha", alpha)
    if alpha == 0:
        reader.warn("lora_alpha", alpha, "switches the adapter off")
    elif alpha < 0:
        reader.warn("lora_alpha", alpha, "is negative: the adapter is subtracted from the base")
    return alpha


def _alpha_pattern(reader: AdapterConfigReader) -> tuple[tuple[str, float], ...]:
    pairs = reader.numbers_by_pattern("alpha_pattern")
    for pattern, alpha in pairs:
        _check_alpha(reader, f"alpha_pattern.{pattern}", alpha)
    return pairs


def _check_alpha(reader: AdapterConfigReader, field: str, alpha: float) -> None:
    """Refuse an alpha so large that every answer would overflow."""
    if abs(alpha) > MAX_ALPHA:
        reader.refuse(field, alpha, f"must be a number from -{MAX_ALPHA:g} to {MAX_ALPHA:g}")


def _bias(reader: AdapterConfigReader) -> str:
    value = reader.fields.get("bias", "none")
    if isinstance(value, str) and value in ("none", "all", "lora_only"):
        return value
    reader.refuse("bias", value, 'must be "none", "all" or "lora_only"')
    return "none"


def _modules_to_save(reader: AdapterConfigReader) -> tuple[str, ...]:
    """`modules_to_save`, with the names that PEFT adds when it loads an adapter of the task."""
    names = reader.plain_names("modules_to_save")
    added = SAVED_HEADS if reader.fields.get("task_type") == SEQ_CLS else ()
    return tuple(dict.fromkeys((*names, *added)))


def _token_indices(reader: AdapterConfigReader) -> tuple[tuple[str, tuple[int, ...]], ...]:
    value = reader.fields.get("trainable_token_indices")
    if value is None or value == [] or value == {}:
        return ()
    by_module: dict[str, object] = value if isinstance(value, dict) else {THE_EMBEDDING: value}
    result: list[tuple[str, tuple[int, ...]]] = []
    for module, indices in sorted(by_module.items()):
        if not is_index_list(indices) or len(set(indices)) != len(indices):
            reader.refuse("trainable_token_indices", indices, "must be distinct token ids")
            return ()
        result.append((module, tuple(indices)))
    return tuple(result)


def _target_parameters(reader: AdapterConfigReader) -> tuple[str, ...]:
    value = reader.fields.get("target_parameters")
    if isinstance(value, str):
        reader.refuse("target_parameters", value, "must be a list of parameter names")
        return ()
    return reader.plain_names("target_parameters")


def _invocation_tokens(reader: AdapterConfigReader) -> tuple[int, ...] | None:
    value = reader.fields.get("alora_invocation_tokens")
    if value is None:
        return None
    if not isinstance(value, list) or not value or not is_index_list(value):
        reader.refuse("alora_invocation_tokens", value, "must be a list of token ids, or null")
        return None
    return tuple(value)


def canonical_config(config: AdapterConfig) -> dict[str, object]:
    """The fields that decoding depends on, as a config that `parse_config` reads back unchanged.

    Two files that mean the same give the same result: sets are sorted, defaults are filled in, and
    fields without effect on decoding (names, versions, training parameters) are left out. The
    pattern maps keep their order, since the first match wins.
    """
    tokens = {module: list(ids) for module, ids in config.trainable_token_indices}
    alora = config.alora_invocation_tokens
    tying = {"ensure_weight_tying": True} if config.ensure_weight_tying else {}
    task = {"task_type": config.task} if config.task != CAUSAL_LM else {}
    rope = {"rope_scaling": config.rope_scaling.to_fields()} if config.rope_scaling else {}
    eos = {"eos_token_id": list(config.eos_token_ids)} if config.eos_token_ids else {}
    fields: dict[str, object] = {
        **tying,
        **task,
        **config.pooling.to_fields(),
        **rope,
        **eos,
        "alora_invocation_tokens": None if alora is None else list(alora),
        "alpha_pattern": {key: _plain(alpha) for key, alpha in config.alpha_pattern},
        "bias": config.bias,
        "exclude_modules": _listed(config.exclude_modules) or None,
        "init_lora_weights": not config.init_is_random,
        "layers_pattern": list(config.layers_pattern) or None,
        "layers_to_transform": list(config.layers_to_transform) or None,
        "lora_alpha": _plain(config.lora_alpha),
        "lora_bias": config.lora_bias,
        "modules_to_save": sorted(config.modules_to_save) or None,
        "peft_type": "LORA",
        "r": config.r,
        "rank_pattern": dict(config.rank_pattern),
        "target_modules": _listed(config.target_modules),
        "target_parameters": list(config.target_parameters) or None,
        "trainable_token_indices": tokens or None,
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,
    }
    return dict(sorted(fields.items()))


def canonical_json(value: object) -> bytes:
    """The one spelling of a JSON value: UTF-8, no spaces, keys in the order they are given."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _listed(names: Names | None) -> str | list[str] | None:
    return list(names) if isinstance(names, tuple) else names


def _plain(number: float) -> int | float:
    """An integer for a whole float, so that 16.0 and 16 are the same alpha."""
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
