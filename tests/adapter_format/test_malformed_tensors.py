"""Tensor files that lie, and tensors that do not belong: refused under the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loraplex.adapter_format import parse_header, prefix_bytes, validate
from loraplex.adapter_format.safetensors_header import MAX_HEADER_BYTES
from loraplex.errors import InvalidAdapter
from tests.adapter_format import builders
from tests.adapter_format.builders import Adapter, Tensor, tiny_geometry

FILE = "adapter_model.safetensors"
A0 = f"{builders.PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = f"{builders.PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight"
M0 = f"{builders.PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector"

Entry = dict[str, Any]


def two_tensors() -> tuple[dict[str, Entry], bytes]:
    """Header and body of a file with tensors `x` and `y`, 8 bytes each."""
    file = builders.tensor_file({"x": Tensor("F32", (2,)), "y": Tensor("F16", (2, 2))})
    header, body = builders.split_file(file)
    return header, body  # type: ignore[return-value]


def refusal(data: bytes, file_size: int | None = None) -> tuple[str, str]:
    with pytest.raises(InvalidAdapter) as caught:
        parse_header(data, len(data) if file_size is None else file_size)
    violation = caught.value.violations[0]
    return violation.field, violation.description


def changed(name: str, **fields: object) -> Callable[[dict[str, Entry]], None]:
    return lambda header: header[name].update(fields)


LIES: dict[str, tuple[Callable[[dict[str, Entry]], Any], str, str]] = {
    "dtype-unknown": (changed("x", dtype="F33"), "x", "dtype must be"),
    "dtype-f64": (changed("x", dtype="F64", shape=[1]), "x", "dtype must be"),
    "dtype-int": (changed("x", dtype="I32"), "x", "dtype must be"),
    "dtype-fp8": (changed("x", dtype="F8_E4M3", shape=[8]), "x", "dtype must be"),
    "dtype-null": (changed("x", dtype=None), "x", "dtype must be"),
    "dtype-list": (changed("x", dtype=["F32"]), "x", "dtype must be"),
    "shape-too-large": (changed("x", shape=[3]), "x", "need 12 bytes"),
    "shape-too-small": (changed("x", shape=[1]), "x", "need 4 bytes"),
    "shape-zero": (changed("x", shape=[0]), "x", "need 0 bytes"),
    "shape-negative": (changed("x", shape=[-2]), "x", "shape must be"),
    "shape-float": (changed("x", shape=[2.0]), "x", "shape must be"),
    "shape-bool": (changed("y", shape=[True, 4]), "y", "shape must be"),
    "shape-string": (changed("x", shape="2"), "x", "shape must be"),
    "shape-null": (changed("x", shape=None), "x", "shape must be"),
    "shape-nested": (changed("x", shape=[[2]]), "x", "shape must be"),
    "shape-overflow": (changed("x", shape=[2**62, 2**62]), "x", "bytes"),
    "shape-wraps-to-8": (changed("x", shape=[2**61 + 1, 2]), "x", "bytes"),
    "shape-2**64": (changed("x", shape=[2**64]), "x", "shape must be"),
    "shape-many": (changed("x", shape=[1] * 8 + [2]), "x", "shape must be"),
    "offsets-swapped": (changed("x", data_offsets=[8, 0]), "x", "data_offsets must be"),
    "offsets-one": (changed("x", data_offsets=[0]), "x", "data_offsets must be"),
    "offsets-three": (changed("x", data_offsets=[0, 8, 16]), "x", "data_offsets must be"),
    "offsets-negative": (changed("x", data_offsets=[-8, 0]), "x", "data_offsets must be"),
    "offsets-float": (changed("x", data_offsets=[0, 8.0]), "x", "data_offsets must be"),
    "offsets-null": (changed("x", data_offsets=None), "x", "data_offsets must be"),
    "offsets-huge": (changed("x", data_offsets=[2**70, 2**70 + 8]), "", "digits"),
    "overlap": (changed("y", data_offsets=[0, 8]), "y", "overlaps"),
    "partial-overlap": (changed("y", data_offsets=[4, 12]), "y", "overlaps"),
    "gap": (changed("y", data_offsets=[12, 20]), "y", "gap"),
    "gap-at-start": (lambda header: header.pop("x"), "y", "gap"),
    "rest-unclaimed": (lambda header: header.pop("y"), "", "bytes of no tensor"),
    "entry-is-list": (lambda header: header.update(x=[]), "x", "must be an object"),
    "entry-is-null": (lambda header: header.update(x=None), "x", "must be an object"),
    "entry-lacks-dtype": (lambda header: header["x"].pop("dtype"), "x", "exactly"),
    "entry-lacks-shape": (lambda header: header["x"].pop("shape"), "x", "exactly"),
    "entry-lacks-offsets": (lambda header: header["x"].pop("data_offsets"), "x", "exactly"),
    "entry-has-more": (changed("x", strides=[1]), "x", "exactly"),
    "no-tensors": (lambda header: header.clear(), "", "no tensors"),
    "metadata-list": (lambda header: header.update(__metadata__=[]), "__metadata__", "strings"),
    "metadata-number": (
        lambda header: header.update(__metadata__={"a": 1}),
        "__metadata__",
        "strings",
    ),
    "name-empty": (lambda header: header.update({"": header.pop("x")}), "", "characters"),
    "name-long": (
        lambda header: header.update({"n" * 600: header.pop("x")}),
        "n" * 512,
        "characters",
    ),
    "name-control": (lambda header: header.update({"a\nb": header.pop("x")}), "a\nb", "ASCII"),
    "name-unicode": (lambda header: header.update({"é": header.pop("x")}), "é", "ASCII"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str) -> None:
    change, tensor, problem = LIES[lie]
    header, body = two_tensors()
    change(header)
    field, description = refusal(builders.with_header(json.dumps(header).encode(), body))
    assert field == (f"{FILE}:{tensor}" if tensor or lie == "name-empty" else FILE)
    assert problem in description


def good_header() -> bytes:
    return json.dumps(two_tensors()[0]).encode()


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "seven-bytes": (b"\x00" * 7, "too short"),
    "only-length": ((200).to_bytes(8, "little"), "cut off"),
    "zero-length": (bytes(8), "no JSON header"),
    "length-2**63": (b"\xff" * 16, "more than"),
    "length-just-over": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "more than"),
    "length-too-long": ((1000).to_bytes(8, "little") + good_header(), "cut off"),
    "length-too-short": (builders.with_header(good_header(), b"")[:8] + good_header()[:20], "cut"),
    "pickle": (b"\x80\x04\x95" + b"\x00" * 40, "more than"),
    "zip": (b"PK\x03\x04" + b"\x00" * 40, "more than"),
    "html": (b"<!DOCTYPE html><html>" * 3, "more than"),
    "lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "more than"),
    "list": (builders.with_header(b"[1]", b""), "no JSON header"),
    "leading-space": (builders.with_header(b" " + good_header(), b"\x00" * 16), "no JSON header"),
    "not-utf8": (builders.with_header(b'{"\xff": 1}', b""), "not UTF-8"),
    "not-json": (builders.with_header(b'{"x": }', b""), "not JSON"),
    "nan": (builders.with_header(b'{"x": NaN}', b""), "NaN"),
    "duplicate": (builders.with_header(b'{"x": {}, "x": {}}', b""), "twice"),
    "duplicate-field": (builders.with_header(b'{"x": {"dtype": 1, "dtype": 2}}', b""), "twice"),
    "deep": (builders.with_header(b'{"x": ' + b"[" * 99 + b"]" * 99 + b"}", b""), "nested"),
    "many": (builders.with_header(b'{"x": [' + b"1," * 900_000 + b"1]}", b""), "more than"),
    "body-short": (builders.with_header(good_header(), b"\x00" * 15), "cut off"),
    "body-long": (builders.with_header(good_header(), b"\x00" * 17), "bytes of no tensor"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused(kind: str) -> None:
    data, problem = BROKEN[kind]
    field, description = refusal(data)
    assert field.startswith(FILE)
    assert problem in description


def test_trailing_spaces_in_the_header_are_fine() -> None:
    data = builders.with_header(good_header() + b"   ", b"\x00" * 16)
    assert [info.name for info in parse_header(data, len(data)).tensors] == ["x", "y"]


def test_offsets_count_from_the_start_of_the_file() -> None:
    header, body = two_tensors()
    data = builders.with_header(json.dumps(header).encode(), body)
    parsed = parse_header(data[: prefix_bytes(data[:8], len(data))], len(data))
    assert parsed.header_bytes == len(data) - 16
    assert [(info.begin, info.end) for info in parsed.tensors] == [
        (parsed.header_bytes, parsed.header_bytes + 8),
        (parsed.header_bytes + 8, len(data)),
    ]
    assert [info.shape for info in parsed.tensors] == [(2,), (2, 2)]


def test_a_tensor_without_bytes_may_share_its_offset() -> None:
    file = builders.tensor_file({"x": Tensor("F32", (0, 4)), "y": Tensor("F32", (1,))})
    assert len(parse_header(file, len(file)).tensors) == 2


MISPLACED: dict[str, tuple[dict[str, Tensor | None], str, str]] = {
    "a-missing": ({A0: None}, B0, "has no lora_A"),
    "b-missing": ({B0: None}, A0, "has no lora_B"),
    "a-rank": ({A0: Tensor("F32", (3, 8))}, A0, "must be [4, 8]"),
    "b-rank": ({B0: Tensor("F32", (8, 3))}, B0, "must be [8, 4]"),
    "a-width": ({A0: Tensor("F32", (4, 9))}, A0, "must be [4, 8]"),
    "b-width": ({B0: Tensor("F32", (9, 4))}, B0, "must be [8, 4]"),
    "a-transposed": ({A0: Tensor("F32", (8, 4))}, A0, "must be [4, 8]"),
    "a-flat": ({A0: Tensor("F32", (32,))}, A0, "must be [4, 8]"),
    "a-cube": ({A0: Tensor("F32", (4, 8, 1))}, A0, "must be [4, 8]"),
    "a-empty": ({A0: Tensor("F32", (0, 8))}, A0, "must be [4, 8]"),
    "b-scalar": ({B0: Tensor("F32", ())}, B0, "must be [8, 4]"),
    "stray-magnitude": ({M0: Tensor("F32", (8,))}, M0, "use_dora is false"),
    "unselected": (
        builders.lora_pair("model.layers.0.mlp.up_proj", 4),
        f"{builders.PREFIX}model.layers.0.mlp.up_proj.lora_A.weight",
        "not selected by target_modules",
    ),
    "layer-beyond": (
        {f"{builders.PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight": Tensor("F32", (4, 8))},
        f"{builders.PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight",
        "the base does not have",
    ),
}

NAMES = {
    "no-prefix": ("model.layers.0.self_attn.q_proj.lora_A.weight", "does not start with"),
    "half-prefix": ("base_model.layers.0.q_proj.lora_A.weight", "does not start with"),
    "adapter-name": (A0.replace("lora_A", "lora_A.default"), "adapter name"),
    "no-weight": (A0.removesuffix(".weight"), "adapter name"),
    "other-part": (A0.replace("lora_A", "lora_C"), "not a part of a LoRA adapter"),
    "diag": (A0.replace("lora_A.weight", "lora_diag"), "not a part of a LoRA adapter"),
    "nested": (A0.replace("lora_A", "lora_A.weight.lora_A"), "adapter name"),
    "magnitude-weight": (M0 + ".weight", "adapter name"),
    "unknown": (f"{builders.PREFIX}model.scores", "not a part of a LoRA adapter"),
    "lora-bias": (B0.replace("weight", "bias"), "lora_bias is false"),
    "bias": (f"{builders.PREFIX}model.layers.0.self_attn.q_proj.bias", "the base has none"),
    "base-bias": (A0.replace("lora_A.weight", "base_layer.bias"), "the base has none"),
    "embedding": (f"{builders.PREFIX}model.embed_tokens.weight", "must agree"),
    "head": (f"{builders.PREFIX}lm_head.weight", "must agree"),
    "linear": (f"{builders.PREFIX}model.layers.0.mlp.up_proj.weight", "not in modules_to_save"),
    "norm": (f"{builders.PREFIX}model.norm.weight", "not in modules_to_save"),
    "base-weight": (f"{builders.PREFIX}lm_head.base_layer.weight", "copy of the base"),
    "embedding-a": (f"{builders.PREFIX}model.embed_tokens.lora_embedding_A", "no lora_embedding_B"),
    "embedding-linear": (f"{builders.PREFIX}model.embed_tokens.lora_A.weight", "on an embedding"),
    "linear-embedding": (A0.replace("lora_A.weight", "lora_embedding_A"), "on a linear"),
    "tokens": (
        f"{builders.PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta",
        "no entry in trainable_token_indices",
    ),
    "head-lora": (f"{builders.PREFIX}lm_head.lora_A.weight", "has no lora_B"),
    "norm-lora": (f"{builders.PREFIX}model.norm.lora_A.weight", "norm of the base"),
}
MISPLACED |= {
    f"name-{key}": ({name: Tensor("F32", (4, 8))}, name, why) for key, (name, why) in NAMES.items()
}


@pytest.mark.parametrize("kind", MISPLACED)
def test_a_tensor_at_a_wrong_offset_is_refused_by_name(kind: str) -> None:
    changes, tensor, problem = MISPLACED[kind]
    with pytest.raises(InvalidAdapter) as caught:
        Adapter().with_tensors(changes).validate(tiny_geometry())
    descriptions = {v.field: v.description for v in caught.value.violations}
    assert problem in descriptions[f"{FILE}:{tensor}"]


def test_dora_needs_a_magnitude_for_every_module() -> None:
    with pytest.raises(InvalidAdapter) as caught:
        Adapter().with_config(use_dora=True).validate(tiny_geometry())
    assert len(caught.value.violations) == 4
    assert "no lora_magnitude_vector" in caught.value.violations[0].description


def test_dora_magnitudes_have_the_width_of_the_output() -> None:
    magnitudes = {
        f"{builders.PREFIX}{module}.lora_magnitude_vector": Tensor(
            "F32", (builders.LAYER_SHAPES[module.split(".", 3)[3]][1],)
        )
        for module in builders.modules_named("q_proj", "v_proj")
    }
    adapter = Adapter().with_config(use_dora=True)
    report = adapter.with_tensors(magnitudes).validate(tiny_geometry())
    assert all(module.magnitude is not None for module in report.modules)
    with pytest.raises(InvalidAdapter) as caught:
        adapter.with_tensors({**magnitudes, M0: Tensor("F32", (4,))}).validate(tiny_geometry())
    assert caught.value.violations[0].field == f"{FILE}:{M0}"


def test_selected_modules_without_tensors_are_refused_unless_they_are_allowed() -> None:
    adapter = Adapter().with_config(target_modules=["q_proj", "v_proj", "o_proj"])
    with pytest.raises(InvalidAdapter) as caught:
        adapter.validate(tiny_geometry())
    (violation,) = caught.value.violations
    assert (violation.field, violation.value) == (FILE, "2 of 6 modules")
    assert "model.layers.0.self_attn.o_proj" in violation.description
    (warning,) = adapter.validate(tiny_geometry(), allow_missing=True).warnings
    assert (warning.field, warning.value) == (FILE, "2 of 6 modules")


def test_a_selected_module_without_tensors_is_refused_if_peft_would_make_it_random() -> None:
    adapter = Adapter().with_config(target_modules=["q_proj", "v_proj", "o_proj"])
    with pytest.raises(InvalidAdapter, match="random"):
        adapter.with_config(init_lora_weights=False).validate(tiny_geometry())


def test_without_default_targets_the_config_must_name_them() -> None:
    adapter = Adapter().with_config(target_modules=None)
    with pytest.raises(InvalidAdapter) as caught:
        adapter.validate(tiny_geometry("phi3"))
    assert caught.value.violations[0].field == "adapter_config.json:target_modules"


def test_a_rank_may_exceed_the_width_of_its_layer() -> None:
    tensors = builders.tensor_file(builders.good_tensors(rank=32))
    adapter = Adapter(tensors=tensors).with_config(r=32)
    assert adapter.validate(tiny_geometry()).max_rank == 32


def test_a_rank_over_the_limit_is_refused_once_with_the_limit() -> None:
    with pytest.raises(InvalidAdapter) as caught:
        Adapter().validate(tiny_geometry(), max_rank=3)
    [violation] = caught.value.violations
    assert violation.field == "adapter_config.json:r"
    assert violation.value.startswith("rank 4 of model.layers.")
    assert "3" in violation.description


def test_an_absent_rank_must_be_that_of_the_tensors() -> None:
    adapter = Adapter().with_config(r=...)
    with pytest.raises(InvalidAdapter, match="rank 8"):
        adapter.validate(tiny_geometry())
    tensors = builders.tensor_file(builders.good_tensors(rank=8))
    assert Adapter(adapter.config, tensors).validate(tiny_geometry()).max_rank == 8


@pytest.mark.parametrize(("r", "is_base"), [(9, False), (4, True)])
def test_a_rank_that_the_tensors_do_not_have_is_not_taken_for_the_wrong_base(
    r: int, is_base: bool
) -> None:
    adapter, tiny = Adapter().with_config(r=r), tiny_geometry()
    if is_base:  # of another width: here the base is to blame
        wide = (replace(m, in_features=2 * m.in_features) for m in tiny.modules)
        tiny = replace(tiny, modules=tuple(wide))
    size = len(adapter.tensors)
    for base, is_named in (("acme/other", is_base), ("tiny", False)):  # trained on example/tiny
        with pytest.raises(InvalidAdapter) as caught:
            validate(adapter.config, adapter.tensors, size, (), tiny, base_names=(base,))
        assert ("was trained on" in caught.value.message) == is_named
        assert is_named or f"for rank {r}" in caught.value.message


def test_config_and_header_are_both_reported() -> None:
    with pytest.raises(InvalidAdapter) as caught:
        Adapter(b"{}", b"").validate(tiny_geometry())
    assert [violation.field for violation in caught.value.violations] == [
        "adapter_config.json:peft_type",
        FILE,
    ]


def test_ten_thousand_bad_tensors_are_summed_up() -> None:
    tensors = {f"bad.{index}": Tensor("F32", (1,)) for index in range(10_000)}
    with pytest.raises(InvalidAdapter) as caught:
        Adapter(tensors=builders.tensor_file(tensors)).validate(tiny_geometry())
    assert len(caught.value.violations) == 100


def test_shapes_are_checked_against_each_other_without_a_base() -> None:
    assert Adapter().validate().num_modules == 4
    with pytest.raises(InvalidAdapter):
        Adapter().with_tensors({A0: Tensor("F32", (3, 8))}).validate()
