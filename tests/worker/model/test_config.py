"""config.json: read once, unknown fields refused by name."""

import json

import pytest

from loraplex.adapter_format.base_types import NATIVE_TYPES
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.model.config_reader import eos_token_ids
from loraplex_services.worker.model.families import FAMILIES, read_model_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


def write(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def field_of(error) -> str:
    return error.value.violations[0].field


def test_the_types_that_can_be_registered_are_those_of_the_families():
    assert set(FAMILIES) == NATIVE_TYPES


def test_absent_fields_have_the_meaning_of_transformers(tmp_path):
    _, config = read_model_config(write(tmp_path))
    assert config.num_kv_heads == 4
    assert config.head_dim == 8
    assert not config.tied_embeddings
    assert config.windows == (None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_sinks", True),
        ("residual_multiplier", 0.5),
        ("hidden_act", "prelu"),
        ("num_attention_heads", "4"),
        ("vocab_size", 0),
        ("rms_norm_eps", None),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_what_is_unknown_or_odd_is_refused_by_name(tmp_path, key, value):
    if value is None:
        value = "1e-6"
    with pytest.raises(Unsupported) as error:
        read_model_config(write(tmp_path, **{key: value}))
    assert field_of(error) == f"config.json:{key}"


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("phi3", "sliding_window", 0.5),
        ("mixtral", "sliding_window", [1]),
        ("ministral3", "sliding_window", "16"),
        ("qwen2", "max_window_layers", "all"),
        ("qwen3_moe", "mlp_only_layers", 1),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma2", "final_logit_softcapping", -1),
        ("gemma3_text", "sliding_window_pattern", 0),
        ("gemma3_text", "rope_parameters", 3),
    ],
)
def test_a_value_that_no_model_can_have_is_refused_by_name(tmp_path, model_type, key, value):
    own = {"moe_intermediate_size": 8, "num_experts": 8, "num_local_experts": 8}
    fields = own if model_type in ("qwen3_moe", "mixtral") else {}
    with pytest.raises(Unsupported) as error:
        read_model_config(write(tmp_path, model_type=model_type, **fields, **{key: value}))
    assert field_of(error) == f"config.json:{key}"


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "rope_type"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "long_factor"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [1.0],
                "original_max_position_embeddings": 8,
            },
            "short_factor",
        ),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "default", "rope_theta": "many"}, "rope_theta"),
        ({"rope_type": "default", "partial_rotary_factor": True}, "partial_rotary_factor"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 4,
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings",
        ),
    ],
)
def test_rotary_settings_that_are_not_served_are_refused_by_name(tmp_path, params, key):
    with pytest.raises(Unsupported) as error:
        read_model_config(write(tmp_path, rope_parameters=params))
    assert field_of(error) == f"config.json:rope_parameters.{key}"


def test_yarn_is_refused_for_heads_with_an_odd_number_of_components(tmp_path):
    params = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(Unsupported, match="even number of rotated components in a head, not 15"):
        read_model_config(write(tmp_path, head_dim=15, rope_parameters=params))


@pytest.mark.parametrize("length", [0, -8, "8", 8.5])
def test_a_rope_that_was_trained_for_no_length_is_refused(tmp_path, length):
    params = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": length,
    }
    with pytest.raises(Unsupported, match="must be a positive integer") as error:
        read_model_config(write(tmp_path, rope_parameters=params))
    assert field_of(error) == "config.json:original_max_position_embeddings"


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_an_absent_number_of_key_heads_is_that_of_transformers(tmp_path, model_type):
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(model_type, num_attention_heads=64).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    expected = transformers.AutoConfig.from_pretrained(tmp_path).num_key_value_heads
    assert read_model_config(tmp_path)[1].num_kv_heads == expected


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma4_text", {"num_experts": 4, "top_k_experts": 8, "moe_intermediate_size": 16}),
        ("qwen3_moe", {"shared_expert_intermediate_size": 16}),
    ],
)
def test_fields_of_experts_that_transformers_does_not_use_change_nothing(
    tmp_path, model_type, fields
):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(model_type)
    theirs.save_pretrained(tmp_path)
    plain = read_model_config(tmp_path)[1]
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **fields}))
    assert read_model_config(tmp_path)[1] == plain


@pytest.mark.parametrize(
    ("wrapper", "cap"), [("gemma3", None), ("gemma4", 2.0), ("gemma4_unified", 2.0)]
)
def test_the_heads_of_wrappers_cap_logits_where_those_of_transformers_do(tmp_path, wrapper, cap):
    config = {"model_type": wrapper, "text_config": {"final_logit_softcapping": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path)[1].logit_softcap == cap


def test_unknown_fields_that_say_nothing_are_accepted(tmp_path):
    read_model_config(write(tmp_path, new_feature=False, other=None, list_of_things=[]))


def test_an_unknown_family_is_refused_and_the_known_ones_are_named(tmp_path):
    with pytest.raises(Unsupported, match="llama") as error:
        read_model_config(write(tmp_path, model_type="gpt_neox"))
    assert field_of(error) == "config.json:model_type"


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_model_config(tmp_path)


def test_end_tokens_come_from_both_files(tmp_path):
    write(tmp_path, eos_token_id=5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5, 7]}))
    assert eos_token_ids(tmp_path) == (5, 7, 9)


@pytest.mark.parametrize("value", ["</s>", [1, "</s>"], -1, 2.0])
def test_an_end_that_is_no_token_id_is_refused(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(InvalidRequest, match=r"generation_config\.json:eos_token_id"):
        eos_token_ids(tmp_path)


def test_a_null_window_of_mistral_differs_from_an_absent_one(tmp_path):
    _, absent = read_model_config(write(tmp_path, model_type="mistral"))
    _, null = read_model_config(write(tmp_path, model_type="mistral", sliding_window=None))
    assert absent.windows == (4096, 4096)
    assert null.windows == (None, None)


@pytest.mark.parametrize("first", [0, 2, 28])
@pytest.mark.parametrize("name", ["Qwen2Config", "Qwen3Config", "Qwen2MoeConfig", "Qwen3MoeConfig"])
def test_windows_without_layer_types_are_those_of_transformers(tmp_path, name, first):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 5, "sliding_window": 64, "max_window_layers": first}
    written = getattr(transformers, name)(use_sliding_window=True, **sizes).to_dict()
    written = {key: value for key, value in written.items() if key != "layer_types"}
    for window in (64, None):
        (tmp_path / "config.json").write_text(json.dumps({**written, "sliding_window": window}))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        full = "full_attention" if theirs.sliding_window is None else "sliding_attention"
        types = getattr(theirs, "layer_types", None) or [full] * 5  # not read in Qwen 3 MoE
        if theirs.sliding_window is None and "sliding_attention" in types:
            continue  # Qwen 2 MoE, with which transformers fails
        expected = [window if kind == "sliding_attention" else None for kind in types]
        _, ours = read_model_config(tmp_path)
        assert list(ours.windows) == expected


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_more_active_experts_than_there_are_is_refused_by_name(tmp_path, name):
    """Kernels take the number as it is, and would write beyond their buffers."""
    experts = {"num_local_experts": 3}
    if name.startswith("qwen"):
        experts["moe_intermediate_size"] = 8
    read_model_config(write(tmp_path, model_type=name, **experts, num_experts_per_tok=3))
    with pytest.raises(Unsupported) as error:
        read_model_config(write(tmp_path, model_type=name, **experts, num_experts_per_tok=4))
    assert field_of(error) == "config.json:num_experts_per_tok"


def test_recurrent_layers_with_another_activation_are_refused_by_name(tmp_path):
    layers = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    read_model_config(write(tmp_path, model_type="qwen3_5_text", **layers))
    with pytest.raises(Unsupported) as error:
        read_model_config(write(tmp_path, model_type="qwen3_5_text", hidden_act="relu", **layers))
    assert field_of(error) == "config.json:hidden_act"


def test_layers_that_slide_without_a_window_are_refused_by_name(tmp_path):
    types = ["sliding_attention", "full_attention"]
    for fields in ({"use_sliding_window": False}, {"sliding_window": None}):
        file = {"use_sliding_window": True, "layer_types": types, **fields}
        with pytest.raises(Unsupported) as error:
            read_model_config(write(tmp_path, model_type="qwen2", **file))
        assert field_of(error) == "config.json:layer_types"


def test_a_family_without_partial_rotation_ignores_the_key_or_refuses_it_as_transformers_fails(
    tmp_path,
):
    part = {"partial_rotary_factor": 0.5}
    _, llama = read_model_config(write(tmp_path, **part))
    _, phi3 = read_model_config(write(tmp_path, model_type="phi3", **part))
    assert (llama.ropes[0].dim, phi3.ropes[0].dim) == (8, 4)
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **part}}
    with pytest.raises(Unsupported) as error:
        read_model_config(write(tmp_path, **scaled))
    assert field_of(error) == "config.json:rope_parameters.partial_rotary_factor"


def test_what_a_rope_leaves_out_is_the_context_as_in_transformers(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 2.0}
    _, config = read_model_config(
        write(tmp_path, rope_parameters=yarn, max_position_embeddings=2048)
    )
    assert dict(config.ropes[0].params)["original_max_position_embeddings"] == 2048


@pytest.mark.parametrize("config_class", ["LlamaConfig", "Gemma3TextConfig"])
def test_a_scaling_that_is_added_to_a_new_file_goes_first_as_in_transformers(
    tmp_path, config_class
):
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, config_class)(num_hidden_layers=6)
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    scaling = {"rope_type": "linear", "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "rope_scaling": scaling}))
    params = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    params = params.get("full_attention", params)
    _, config = read_model_config(tmp_path)
    assert config.ropes[-1].kind == params["rope_type"] == "linear"
    assert dict(config.ropes[-1].params)["factor"] == params["factor"] == 4.0
    assert config.ropes[-1].theta == params["rope_theta"]


def test_the_long_rope_of_some_layers_is_read_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    own = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 64, **own}
    theirs = transformers.Gemma3TextConfig(num_hidden_layers=6, head_dim=8, rope_scaling=scaling)
    theirs.save_pretrained(tmp_path)
    _, config = read_model_config(tmp_path)
    assert [rope.kind for rope in config.ropes] == ["default"] * 5 + ["longrope"]
    params = dict(config.ropes[-1].params)
    assert params["factor"] == theirs.max_position_embeddings / 64
    assert config.rope_switch_len == 64
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["max_position_embeddings"]  # that of the library is then the same
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert dict(read_model_config(tmp_path)[1].ropes[-1].params)["factor"] == params["factor"]
    raw["rope_parameters"]["sliding_attention"] = {
        **scaling,
        "original_max_position_embeddings": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(Unsupported) as error:
        read_model_config(tmp_path)
    assert "one original_max_position_embeddings" in error.value.violations[0].description


def test_ministral_3_without_rotary_settings_has_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Ministral3Config(num_hidden_layers=1).rope_parameters
    fields = {"model_type": "ministral3", "num_key_value_heads": 2, "head_dim": 8}
    _, config = read_model_config(write(tmp_path, **fields))
    rope = {**dict(config.ropes[0].params), "rope_theta": config.ropes[0].theta}
    for key in ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "rope_theta",
                "original_max_position_embeddings"):  # fmt: skip
        assert rope[key] == theirs[key]
    scale = config.query_scale
    assert (scale.beta, scale.context_len) == (theirs["llama_4_scaling_beta"], 16384)


def test_ministral_3_without_a_theta_in_its_rotary_settings_has_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "linear", "factor": 2.0}
    theirs = transformers.Ministral3Config(rope_parameters=dict(rope)).rope_parameters
    fields = {"model_type": "ministral3", "num_key_value_heads": 2, "head_dim": 8}
    _, config = read_model_config(write(tmp_path, **fields, rope_parameters=rope))
    assert config.ropes[0].theta == theirs["rope_theta"]


def test_a_zero_among_the_optional_numbers_of_yarn_counts_as_absent(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    zeros = {"mscale": 0.7, "mscale_all_dim": 0, "beta_fast": 0}
    _, absent = read_model_config(write(tmp_path, rope_parameters={**yarn, "mscale": 0.7}))
    _, zero = read_model_config(write(tmp_path, rope_parameters={**yarn, **zeros}))
    assert zero.ropes == absent.ropes


def test_rope_parameters_that_are_no_object_are_refused_by_name(tmp_path):
    with pytest.raises(Unsupported) as error:
        read_model_config(write(tmp_path, rope_parameters="linear"))
    assert field_of(error) == "config.json:rope_parameters"
