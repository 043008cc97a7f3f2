"""What decides decoding alongside PEFT's files: a rotary embedding and EOS ids of its own."""

import json

import pytest

from loraplex.adapter_format import parse_config
from loraplex.adapter_format.config import canonical_config, canonical_json
from loraplex.adapter_format.rope_scaling import MAX_CONTEXT, parse, read
from loraplex.adapter_format.serving_fields import complete_config
from loraplex.errors import InvalidAdapter

PLAIN = json.dumps({"peft_type": "LORA", "r": 8}).encode()
YARN = '{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}'


def refusal(label: str) -> tuple[str, str]:
    with pytest.raises(InvalidAdapter) as refused:
        parse(label)
    (violation,) = refused.value.violations
    return violation.field, violation.description


@pytest.mark.parametrize(
    ("label", "field"),
    [
        ("linear:4", ""),
        ("[]", ""),
        ('{"factor": NaN}', ""),
        ("[" * 5000, ""),
        ("{}", ".rope_type"),
        ('{"rope_type": "ntk", "factor": 2}', ".rope_type"),
        ('{"rope_type": "dynamic", "factor": 2}', ".rope_type"),
        ('{"rope_type": ["yarn"], "factor": 2}', ".rope_type"),
        ('{"rope_type": "linear"}', ".factor"),
        ('{"rope_type": "linear", "factor": true}', ".factor"),
        ('{"rope_type": "linear", "factor": 0.5}', ".factor"),
        ('{"rope_type": "linear", "factor": 1e999}', ".factor"),
        ('{"rope_type": "linear", "factor": 2, "beta_fast": 3}', ".beta_fast"),
        ('{"rope_type": "default"}', ".rope_theta"),
        ('{"rope_type": "yarn", "factor": 2, "truncate": 1}', ".truncate"),
        ('{"rope_type": "yarn", "factor": 2, "beta_slow": 0}', ".beta_slow"),
        ('{"rope_type": "linear", "factor": 2, "max_position_embeddings": 2.5}',
         ".max_position_embeddings"),
        ('{"rope_type": "longrope", "short_factor": [1, -1], "long_factor": [1, 1]}',
         ".short_factor"),
        ('{"rope_type": "yarn", "factor": 2, "rope_theta": 1.0}', ".rope_theta"),
        ('{"rope_type": "yarn", "factor": 2, "beta_slow": 1e-320}', ".beta_slow"),
        ('{"rope_type": "longrope", "short_factor": [1], "long_factor": [1],'
         ' "original_max_position_embeddings": 1}', ".original_max_position_embeddings"),
        ('{"rope_type": "longrope", "short_factor": [1e-300], "long_factor": [1]}',
         ".short_factor"),
        ('{"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}',
         ".high_freq_factor"),
    ],
)  # fmt: skip
def test_a_scaling_that_is_none_is_refused_by_its_key(label, field):
    if "1e999" in label:
        label = label.replace("1e999", "1e300")
    found, description = refusal(label)
    assert found == f"rope_scaling{field}"
    assert description


def test_the_context_follows_from_the_scaling():
    def context(**fields):
        return read(fields).context_tokens(512)

    assert context(rope_type="linear", factor=4) == 2048
    assert context(rope_type="linear", factor=4, max_position_embeddings=999) == 999
    assert context(rope_type="yarn", factor=4, original_max_position_embeddings=64) == 512
    assert context(rope_type="yarn", factor=32, original_max_position_embeddings=64) == 2048
    assert context(rope_type="default", rope_theta=1e6) == 512
    assert read({"type": "linear", "factor": 1024}).context_tokens(1 << 20) == MAX_CONTEXT


def test_one_meaning_has_one_spelling():
    spellings = [
        '{"type": "su", "short_factor": [1, 2], "long_factor": [1.5, 2], "factor": null}',
        '{"long_factor":[1.5,2.0],"short_factor":[1.0,2.0],"rope_type":"longrope"}',
    ]
    texts = {parse(spelling).to_json() for spelling in spellings}
    assert len(texts) == 1
    assert parse(texts.pop()) == parse(spellings[0])


def test_label_and_generation_config_become_part_of_the_config():
    generation = json.dumps({"eos_token_id": [9, 2, 9], "temperature": 0.3}).encode()
    raw = complete_config(PLAIN, generation_config=generation, rope_label=YARN)
    config = parse_config(raw)
    assert config.rope_scaling == parse(YARN)
    assert config.eos_token_ids == (2, 9)
    assert config.warnings == ()
    again = parse_config(canonical_json(canonical_config(config)))
    assert (again.rope_scaling, again.eos_token_ids) == (config.rope_scaling, (2, 9))
    assert complete_config(PLAIN, generation_config=b'{"eos_token_id": null}') == PLAIN


@pytest.mark.parametrize("value", ["2", [], [1.5], -1, True, {}, list(range(65))])
def test_bad_eos_ids_are_refused_by_file_and_field(value):
    with pytest.raises(InvalidAdapter) as refused:
        complete_config(PLAIN, generation_config=json.dumps({"eos_token_id": value}).encode())
    assert refused.value.violations[0].field == "generation_config.json:eos_token_id"


def test_two_values_for_one_thing_are_refused():
    raw = complete_config(PLAIN, rope_label=YARN)
    with pytest.raises(InvalidAdapter) as refused:
        complete_config(raw, rope_label='{"rope_type": "linear", "factor": 2}')
    assert refused.value.violations[0].field == "adapter_config.json:rope_scaling"
    assert complete_config(raw, rope_label=YARN) == raw
