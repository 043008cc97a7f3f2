"""Our rules and PEFT's own functions agree on random names, lists and patterns."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.other import get_pattern_key

from loraplex.adapter_format import config_fields, parse_config
from loraplex.adapter_format.patterns import DEFAULT_TARGETS, pattern_map
from loraplex.adapter_format.regex import BadPattern
from loraplex.adapter_format.targets import selector_of
from loraplex.errors import InvalidAdapter
from tests.adapter_format import strategies

_NAMES = st.one_of(strategies.suffixes(), strategies.name_patterns())


def as_json(fields: dict[str, object]) -> bytes:
    return json.dumps({"peft_type": "LORA", **fields}).encode()


@settings(max_examples=600, deadline=None)
@given(
    name=strategies.module_names(),
    targets=_NAMES,
    excluded=st.one_of(st.none(), _NAMES),
    saved=st.one_of(st.none(), strategies.suffixes()),
    layers=st.one_of(st.none(), st.just(0), st.lists(st.sampled_from([0, 1, 12]), max_size=2)),
    pattern=st.one_of(st.none(), st.just("h"), st.just(["layers", "mlp"]), st.just("s")),
)
def test_selection_agrees(
    name: str, targets: object, excluded: object, saved: object, layers: object, pattern: object
) -> None:
    fields: dict[str, object] = {
        "target_modules": targets,
        "exclude_modules": excluded,
        "modules_to_save": saved,
    }
    if isinstance(targets, list):
        fields["layers_to_transform"] = layers
        fields["layers_pattern"] = pattern if layers is not None else None
    try:
        ours = parse_config(as_json(fields))
    except InvalidAdapter:
        assume(False)
    assert ours.target_modules is not None
    theirs = check_target_module_exists(LoraConfig(**fields), name)
    expected = bool(theirs) and not isinstance(theirs, _ExcludedModule)
    assert selector_of(ours, ours.target_modules).selects(name) == expected


@settings(max_examples=600, deadline=None)
@given(strategies.module_names(), st.lists(strategies.name_patterns(), max_size=4))
def test_pattern_keys_agree(name: str, keys: list[str]) -> None:
    try:
        ours = pattern_map([(key, key) for key in keys]).first_match(name)
    except BadPattern:
        assume(False)
    theirs = get_pattern_key(keys, name)
    assert ours == (theirs if theirs in keys else None)


def test_every_field_of_peft_is_decided_and_its_default_is_silent(tmp_path: Path) -> None:
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    raw = (tmp_path / "adapter_config.json").read_bytes()
    decided = config_fields.SHAPING | config_fields.INERT
    decided |= config_fields.REFUSED.keys() | config_fields.TRAINING_ONLY.keys()
    assert set(json.loads(raw)) <= decided
    assert parse_config(raw).warnings == ()


def test_our_defaults_are_those_of_peft() -> None:
    ours, theirs = parse_config(as_json({})), LoraConfig()
    assert (ours.r, ours.lora_alpha) == (theirs.r, theirs.lora_alpha)
    assert (ours.use_rslora, ours.use_dora, ours.lora_bias) == (
        theirs.use_rslora,
        theirs.use_dora,
        theirs.lora_bias,
    )
    assert ours.bias == theirs.bias
    for name in ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform"):
        assert not getattr(ours, name) and not getattr(theirs, name)


def test_default_targets_are_those_of_peft() -> None:
    for model_type, targets in DEFAULT_TARGETS.items():
        assert list(targets) == TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[model_type]


@pytest.mark.parametrize(
    "peft_type", sorted(t.value for t in PEFT_TYPE_TO_CONFIG_MAPPING if t.value != "LORA")
)
def test_every_other_method_of_peft_is_refused(peft_type: str) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        parse_config(json.dumps({"peft_type": peft_type}).encode())
    (violation,) = caught.value.violations
    assert violation.field == "adapter_config.json:peft_type"
    assert violation.value == peft_type


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ".*q", "layers_to_transform": [1]},
        {"target_modules": ".*q", "layers_pattern": "layers"},
        {"target_modules": ["q"], "layers_pattern": "layers"},
        {"target_modules": ["q"], "lora_bias": True, "use_dora": True},
        {"target_modules": ["q"], "lora_bias": True, "init_lora_weights": "gaussian"},
        {"target_parameters": "experts"},
        {"task_type": "POETRY"},
    ],
)
def test_what_peft_refuses_to_read_is_refused(fields: dict[str, object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((ValueError, TypeError)):
            LoraConfig(**fields)
    with pytest.raises(InvalidAdapter):
        parse_config(as_json(fields))
