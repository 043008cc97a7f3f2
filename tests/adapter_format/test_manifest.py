"""The core manifest: equal for what decodes alike, different for what does not, readable back."""

from __future__ import annotations

import json

import pytest

from loraplex.adapter_format import File, core_manifest, digest_of, parse_config, parse_manifest
from loraplex.adapter_format.config import canonical_config, canonical_json
from loraplex.errors import DataLoss
from tests.adapter_format.builders import Adapter, tiny_geometry

GEOMETRY = tiny_geometry()
FILES = (
    File("adapter_config.json", 100, "1" * 64),
    File("adapter_model.safetensors", 200, "2" * 64),
    File("README.md", 300, "3" * 64),
)


def manifest_of(adapter: Adapter, files: tuple[File, ...] = FILES) -> bytes:
    return core_manifest(adapter.validate(GEOMETRY), files, GEOMETRY.fingerprint)


def test_its_bytes_are_fixed() -> None:
    assert manifest_of(Adapter()) == (
        b'{"schema":"loraplex.adapter.v1","base_fingerprint":"sha256:' + b"0" * 64 + b'",'
        b'"config":{"alora_invocation_tokens":null,"alpha_pattern":{},"bias":"none",'
        b'"exclude_modules":null,"init_lora_weights":true,"layers_pattern":null,'
        b'"layers_to_transform":null,"lora_alpha":16,"lora_bias":false,"modules_to_save":null,'
        b'"peft_type":"LORA","r":4,"rank_pattern":{},"target_modules":["q_proj","v_proj"],'
        b'"target_parameters":null,"trainable_token_indices":null,"use_dora":false,'
        b'"use_rslora":false},"files":[{"path":"adapter_model.safetensors","sha256":"'
        + b"2" * 64
        + b'","size":200}],"max_rank":4,"num_modules":4}'
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj", "q_proj"]},
        {"lora_alpha": 16.0},
        {"lora_dropout": 0.9},
        {"peft_version": "0.7.1"},
        {"base_model_name_or_path": "/home/someone/model"},
        {"init_lora_weights": "gaussian"},
        {"layers_to_transform": []},
        {"use_bdlora": ...},
        {"bias": ...},
    ],
)
def test_what_decodes_alike_has_one_digest(fields: dict[str, object]) -> None:
    assert manifest_of(Adapter().with_config(**fields)) == manifest_of(Adapter())


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 17},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}},
        {"layers_to_transform": [0, 1]},
        {"target_modules": ".*(q_proj|v_proj)"},
    ],
)
def test_what_may_decode_differently_has_another_digest(fields: dict[str, object]) -> None:
    other = manifest_of(Adapter().with_config(**fields))
    assert digest_of(other) != digest_of(manifest_of(Adapter()))


def test_the_order_of_patterns_is_part_of_the_identity() -> None:
    one = Adapter().with_config(alpha_pattern={"q_proj": 3, ".*_proj": 5})
    two = Adapter().with_config(alpha_pattern={".*_proj": 5, "q_proj": 3})
    assert manifest_of(one) != manifest_of(two)


def test_only_files_that_decoding_needs_are_part_of_it() -> None:
    assert manifest_of(Adapter()) == manifest_of(Adapter(), FILES[1:2])
    changed = (File("adapter_model.safetensors", 200, "4" * 64),)
    assert manifest_of(Adapter()) != manifest_of(Adapter(), changed)


def test_it_is_read_back() -> None:
    adapter = Adapter().with_config(alpha_pattern={"q_proj": 3.5}, use_rslora=True)
    manifest = parse_manifest(manifest_of(adapter))
    assert manifest.files == FILES[1:2]
    assert manifest.base_fingerprint == GEOMETRY.fingerprint
    assert (manifest.max_rank, manifest.num_modules) == (4, 4)
    again = Adapter(manifest.config_bytes, adapter.tensors)
    assert again.validate(GEOMETRY).modules == adapter.validate(GEOMETRY).modules
    assert manifest_of(again) == manifest_of(adapter)


def test_the_canonical_config_is_its_own_canonical_form() -> None:
    config = parse_config(Adapter().with_config(rank_pattern={"b": 4, "a": 4}).config)
    first = canonical_json(canonical_config(config))
    assert canonical_json(canonical_config(parse_config(first))) == first


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: b"",
        lambda raw: raw.replace(b"adapter.v1", b"adapter.v9"),
        lambda raw: raw.replace(b'"size":200', b'"size":"x"'),
        lambda raw: raw.replace(b'"files"', b'"filez"'),
        lambda raw: raw.replace(b'"max_rank":4', b'"max_rank":null'),
        lambda raw: json.dumps([json.loads(raw)]).encode(),
    ],
)
def test_a_damaged_manifest_is_data_loss(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(DataLoss, match="manifest"):
        parse_manifest(damage(manifest_of(Adapter())))
