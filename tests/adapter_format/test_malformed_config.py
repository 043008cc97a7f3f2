"""Every field of a config, wrong in each way: refused under its own name, with a way out."""

from __future__ import annotations

import json

import pytest

from loraplex.adapter_format import parse_config
from loraplex.adapter_format.config import MAX_CONFIG_BYTES
from loraplex.errors import InvalidAdapter
from tests.adapter_format.builders import PREFIX, Adapter, good_config, tiny_geometry

WRONG: list[tuple[str, object]] = [
    ("peft_type", None),
    ("peft_type", ...),
    ("peft_type", "lora"),
    ("peft_type", ["LORA"]),
    ("peft_type", "ADALORA"),
    ("peft_type", "PREFIX_TUNING"),
    ("peft_type", "LOHA"),
    ("peft_type", "LOKR"),
    ("peft_type", "IA3"),
    ("peft_type", "OFT"),
    ("peft_type", "VERA"),
    ("peft_type", "XLORA"),
    ("peft_type", "TRAINABLE_TOKENS"),
    ("peft_type", ["LORA"]),
    ("r", 0),
    ("r", -4),
    ("r", True),
    ("r", 4.0),
    ("r", "4"),
    ("r", None),
    ("r", 257),
    ("r", 2**40),
    ("lora_alpha", "16"),
    ("lora_alpha", None),
    ("lora_alpha", True),
    ("lora_alpha", [16]),
    ("lora_alpha", 1e308),
    ("lora_alpha", -1e7),
    ("use_rslora", 1),
    ("use_rslora", "true"),
    ("use_rslora", None),
    ("use_dora", "false"),
    ("use_dora", 0),
    ("rank_pattern", ["q_proj"]),
    ("rank_pattern", "q_proj"),
    ("rank_pattern", {f".*{index}": 4 for index in range(600)}),
    ("rank_pattern", {f"q{index}": 4 for index in range(5000)}),
    ("rank_pattern.q_proj", {"q_proj": 0}),
    ("rank_pattern.q_proj", {"q_proj": 4.5}),
    ("rank_pattern.q_proj", {"q_proj": True}),
    ("rank_pattern.(q", {"(q": 4}),
    (r"rank_pattern.(q)\1", {r"(q)\1": 4}),
    ("alpha_pattern", 3),
    ("alpha_pattern.q_proj", {"q_proj": None}),
    ("alpha_pattern.q_proj", {"q_proj": "3"}),
    ("alpha_pattern.q_proj", {"q_proj": 1e300}),
    ("alpha_pattern.[", {"[": 3}),
    ("target_modules", []),
    ("target_modules", ""),
    ("target_modules", 3),
    ("target_modules", ["q_proj", 3]),
    ("target_modules", ["q_proj", ""]),
    ("target_modules", ["q" * 300]),
    ("target_modules", {"q_proj": 1}),
    ("target_modules", "(.*"),
    ("target_modules", "(?i).*Q_PROJ"),
    ("target_modules", r"(.*)\1"),
    ("target_modules", "a" * 3000),
    ("exclude_modules", 1),
    ("exclude_modules", "*"),
    ("exclude_modules", [None]),
    ("layers_to_transform", "0"),
    ("layers_to_transform", [0, "1"]),
    ("layers_to_transform", [-1]),
    ("layers_to_transform", True),
    ("layers_to_transform", 1.0),
    ("layers_pattern", "layers"),
    ("layers_pattern", 3),
    ("layers_pattern", ["(.*)+"]),
    ("bias", "some"),
    ("bias", None),
    ("bias", False),
    ("lora_bias", "no"),
    ("modules_to_save", [".*"]),
    ("modules_to_save", {"lm_head": 1}),
    ("trainable_token_indices", {"embed_tokens": ["1"]}),
    ("trainable_token_indices", "1"),
    ("trainable_token_indices", [1, 2, 1]),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_16"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "lora_ga"),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "brand_new"),
    ("init_lora_weights", None),
    ("init_lora_weights", 1),
    ("use_qalora", True),
    ("use_bdlora", {"target_modules_bd_a": ["q_proj"]}),
    ("arrow_config", {"top_k": 3}),
    ("monteclora_config", {"num_samples": 8}),
    ("kasa_config", {"beta": 1e-4}),
    ("alora_invocation_tokens", []),
    ("alora_invocation_tokens", "go"),
    ("layer_replication", [[0, 4], [2, 5]]),
    ("target_parameters", "mlp.experts.gate_up_proj"),
    ("megatron_config", {"hidden_size": 8}),
    ("task_type", "TOKEN_CLS"),
    ("task_type", "QUESTION_ANS"),
    ("task_type", "SEQ_2_SEQ_LM"),
    ("task_type", "POETRY"),
    ("task_type", 3),
    ("task_type", []),
    ("base_model_name_or_path", 3),
    ("revision", ["main"]),
    ("peft_version", 0.21),
    ("use_tomorrow", True),
    ("tomorrow_config", {"alpha": 1}),
    ("tomorrow_size", 16),
]


@pytest.mark.hostile
@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda part: repr(part)[:60])
def test_a_wrong_field_is_refused_by_name(field: str, value: object) -> None:
    adapter = Adapter().with_config(**{field.split(".")[0]: value})
    with pytest.raises(InvalidAdapter) as caught:
        adapter.validate(tiny_geometry())
    violations = {violation.field: violation for violation in caught.value.violations}
    violation = violations[f"adapter_config.json:{field}"]
    assert len(violation.description) > 20


def test_methods_without_an_equivalent_lora_are_not_sent_to_a_conversion() -> None:
    """For each of them, PEFT would have to load the base to find that out."""
    peft = pytest.importorskip("peft")
    methods = {
        method.value: config for method, config in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }
    without_equivalent = {
        *("ADAPTION_PROMPT", "FROD", "LILY", "LN_TUNING", "POLY", "SHADOW"),
        *("TRAINABLE_TOKENS", "XLORA"),
    } | {
        name
        for name, config in methods.items()
        if issubclass(config, peft.config.PromptLearningConfig)
    }
    assert "PREFIX_TUNING" in without_equivalent
    for name in methods.keys() - {"LORA"}:
        adapter = Adapter().with_config(peft_type=name)
        with pytest.raises(InvalidAdapter) as caught:
            adapter.validate(tiny_geometry())
        [said] = [v.description for v in caught.value.violations if "peft_type" in v.field]
        way_out = "publish these adapters" if name == "XLORA" else "train a LoRA"
        expected = way_out if name in without_equivalent else "registry convert"
        assert expected in said, name


Q0_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("field", "value", "tensor"),
    [
        ("lora_bias", True, Q0_A),
        ("use_dora", True, Q0_A),
        ("modules_to_save", ["lm_head"], "lm_head"),
        ("modules_to_save", ["embed_tokens"], "model.embed_tokens"),
        ("modules_to_save", "norm", "model.layers.0.input_layernorm"),
        ("trainable_token_indices", [1, 2], "model.embed_tokens"),
        ("trainable_token_indices", {"lm_head": [1]}, "lm_head"),
    ],
)
def test_a_promise_that_the_tensors_do_not_keep_is_refused(
    field: str, value: object, tensor: str
) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        Adapter().with_config(**{field: value}).validate(tiny_geometry())
    fields = {violation.field for violation in caught.value.violations}
    assert f"adapter_model.safetensors:{tensor}" in fields


def test_a_field_with_too_much_to_parse_is_refused() -> None:
    patterns = {f"{index}" + "[a]" * 600: 4 for index in range(40)}
    with pytest.raises(InvalidAdapter, match="at most 512, of 65536 characters"):
        parse_config(json.dumps(good_config() | {"rank_pattern": patterns}).encode())


def test_a_violation_shows_the_value() -> None:
    with pytest.raises(InvalidAdapter) as caught:
        Adapter().with_config(use_rslora="y" * 1000).validate()
    assert caught.value.violations[0].value == "y" * 253 + "..."


def raw_config(text: str) -> bytes:
    """A good config whose last field is replaced by `text`."""
    good = json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4})
    return (good[:-1] + text + "}").encode()


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"LORA"', "must be a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (raw_config(', "r": 8'), "key 'r' twice"),
        (raw_config(', "loftq_config": {"a": 1, "a": 2}'), "key 'a' twice"),
        (raw_config(', "lora_alpha": NaN'), "NaN"),
        (raw_config(', "lora_alpha": Infinity'), "Infinity"),
        (raw_config(', "lora_alpha": -Infinity'), "-Infinity"),
        (raw_config(', "lora_alpha": 1e999'), "out of range"),
        (raw_config(', "lora_alpha": ' + "9" * 30), "30 digits"),
        (raw_config(', "lora_alpha": ' + "9" * 9000), "9000 digits"),
        (raw_config(', "x": ' + "[" * 40 + "]" * 40), "nested deeper"),
        (raw_config(', "x": ' + '{"a":' * 5000 + "1" + "}" * 5000), "nested deeper"),
        (b"[" * 200_000, "nested deeper"),
        (raw_config(r', "revision": "\ud800"'), "surrogate"),
        (raw_config(', "revision": "' + "x" * MAX_CONFIG_BYTES + '"'), "larger than"),
        (raw_config(","), "not JSON"),
        (b"{'peft_type': 'LORA'}", "not JSON"),
        (b'{"peft_type": "LORA"}garbage', "not JSON"),
    ],
)
def test_a_file_that_is_no_strict_json_object_is_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        parse_config(raw)
    (violation,) = caught.value.violations
    assert violation.field == "adapter_config.json"
    assert problem in violation.description


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("lora_alpha", 0, "switches the adapter off"),
        ("lora_alpha", -8, "negative"),
        ("init_lora_weights", "mica", "plain LoRA"),
        ("loftq_config", {"loftq_bits": 4}, "ignored"),
        ("eva_config", {"rho": 2.0}, "ignored"),
        ("corda_config", {"corda_method": "ipm"}, "ignored"),
        ("lora_ga_config", {"direction": "ArBr"}, "ignored"),
        ("velora_config", {"num_groups": 4}, "ignored"),
        ("runtime_config", {"ephemeral_gpu_offload": True}, "ignored"),
        ("use_tomorrow", False, "unknown"),
        ("tomorrow_config", None, "unknown"),
        ("tomorrow_list", [], "unknown"),
    ],
)
def test_what_is_harmless_is_warned_about_and_refused_when_strict(
    field: str, value: object, problem: str
) -> None:
    adapter = Adapter().with_config(**{field: value})
    (warning,) = adapter.validate(tiny_geometry()).warnings
    assert warning.field == f"adapter_config.json:{field}"
    assert problem in warning.description
    with pytest.raises(InvalidAdapter):
        adapter.validate(tiny_geometry(), strict=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_lora_weights", False),
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", "orthogonal"),
        ("task_type", None),
        ("qalora_group_size", 64),
        ("lora_dropout", 0.5),
        ("megatron_core", "other.core"),
        ("inference_mode", False),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM"}),
        ("base_model_name_or_path", None),
        ("layers_to_transform", []),
        ("layers_to_transform", [0, 1]),
        ("rank_pattern", None),
        ("modules_to_save", []),
        ("target_modules", r"model\.layers\.\d+\.self_attn\.(q|v)_proj"),
        ("target_modules", None),
    ],
)
def test_what_has_no_effect_or_the_same_effect_is_silent(field: str, value: object) -> None:
    assert Adapter().with_config(**{field: value}).validate(tiny_geometry()).warnings == ()


def test_all_wrong_fields_are_named_at_once() -> None:
    adapter = Adapter().with_config(r=0, bias="some", use_dora=1, use_qalora=True)
    with pytest.raises(InvalidAdapter) as caught:
        adapter.validate(tiny_geometry())
    fields = {violation.field.split(":")[1] for violation in caught.value.violations}
    assert fields == {"r", "bias", "use_dora", "use_qalora"}
    assert "and 3 more" in caught.value.message


def test_absent_fields_have_the_defaults_of_peft() -> None:
    config = parse_config(b'{"peft_type": "LORA"}')
    assert (config.r, config.lora_alpha, config.bias) == (8, 8.0, "none")
    assert config.target_modules is None


def test_the_good_config_is_good() -> None:
    assert parse_config(json.dumps(good_config()).encode()).warnings == ()
