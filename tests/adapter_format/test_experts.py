"""LoRA on experts as parameters: every expert gets its part, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.adapter_format import Geometry, Module
from loraplex.errors import InvalidAdapter
from tests.adapter_format.builders import HIDDEN, PREFIX, Adapter, Tensor, tiny_geometry

NUM_EXPERTS, WIDTH, RANK = 3, 6, 4
CONTAINER = f"{PREFIX}model.layers.0.mlp.experts"
BASE_CONTAINER = "model.layers.0.block_sparse_moe.experts"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def sparse_geometry() -> Geometry:
    plain = tiny_geometry("mixtral")
    experts = [
        Module(f"{BASE_CONTAINER}.{index}.{name}", "linear", *features, False)
        for index in range(NUM_EXPERTS)
        for name, features in (("w1", (HIDDEN, WIDTH)), ("w2", (WIDTH, HIDDEN)))
    ]
    attention = [module for module in plain.modules if ".mlp." not in module.name]
    return replace(plain, modules=(*attention, *experts))


def sparse_adapter(parameters: list[str], **tensors: Tensor) -> Adapter:
    rows = NUM_EXPERTS * RANK
    pairs = {
        f"{CONTAINER}.base_layer.lora_A.weight": (rows, HIDDEN),
        f"{CONTAINER}.base_layer.lora_B.weight": (2 * WIDTH, rows),
        f"{CONTAINER}.lora_A.weight": (rows, WIDTH),
        f"{CONTAINER}.lora_B.weight": (HIDDEN, rows),
    }
    written = {name: Tensor("F32", shape) for name, shape in pairs.items()}
    adapter = Adapter().with_config(target_parameters=parameters)
    return adapter.with_tensors({**written, **tensors})


def test_each_expert_is_a_module_with_its_part_of_the_stack() -> None:
    report = sparse_adapter(BOTH).validate(sparse_geometry())
    found = {m.name: m for m in report.modules if m.expert is not None}
    assert set(found) == {
        f"{BASE_CONTAINER}.{index}.{name}"
        for index in range(NUM_EXPERTS)
        for name in ("gate_up_proj", "down_proj")
    }
    inner, outer = (found[f"{BASE_CONTAINER}.2.{name}"] for name in ("gate_up_proj", "down_proj"))
    assert inner.a is not None and inner.a.name == f"{CONTAINER}.base_layer.lora_A.weight"
    assert outer.a is not None and outer.a.name == f"{CONTAINER}.lora_A.weight"
    assert inner.expert is not None and (inner.expert.index, inner.rank) == (2, RANK)


@pytest.mark.parametrize(
    ("parameters", "field", "problem"),
    [
        (BOTH[:1], f"{CONTAINER}.lora_A.weight", "target_parameters does not have"),
        ([], f"{CONTAINER}.lora_A.weight", "target_parameters does not have"),
    ],
)
def test_nesting_that_target_parameters_does_not_explain_is_refused(
    parameters: list[str], field: str, problem: str
) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        sparse_adapter(parameters).validate(sparse_geometry())
    found = {violation.field: violation.description for violation in caught.value.violations}
    assert problem in found[f"adapter_model.safetensors:{field}"]


def test_parameters_without_tensors_are_refused_unless_they_are_allowed() -> None:
    """As in a file that ends too early: PEFT would leave the experts of the layer as they are."""
    adapter = Adapter().with_config(target_parameters=[*BOTH, "self_attn.o_proj.weight"])
    with pytest.raises(InvalidAdapter) as caught:
        adapter.validate(sparse_geometry())
    (violation,) = caught.value.violations
    assert violation.value == f"{2 * NUM_EXPERTS + 2} of {2 * NUM_EXPERTS + 6} modules"
    assert "model.layers.0.mlp.experts.0.gate_up_proj" in violation.description
    (warning,) = adapter.validate(sparse_geometry(), allow_missing=True).warnings
    assert warning.value == violation.value


def test_a_stack_of_another_number_of_experts_is_refused() -> None:
    name = f"{CONTAINER}.lora_A.weight"
    adapter = sparse_adapter(BOTH, **{name: Tensor("F32", (RANK, WIDTH))})
    with pytest.raises(InvalidAdapter, match="3 experts of rank 4"):
        adapter.validate(sparse_geometry())


@pytest.mark.parametrize("field", ["use_dora", "lora_bias"])
def test_parameters_go_with_no_variant(field: str) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        sparse_adapter(BOTH).with_config(**{field: True}).validate(sparse_geometry())
    fields = {violation.field for violation in caught.value.violations}
    assert f"adapter_config.json:{field}" in fields


def test_a_linear_that_two_fields_select_is_refused_as_peft_refuses_it() -> None:
    adapter = Adapter().with_config(target_parameters=["self_attn.q_proj.weight"])
    with pytest.raises(InvalidAdapter) as caught:
        adapter.validate(sparse_geometry())
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {"adapter_config.json:target_parameters"}
    adapter.with_config(exclude_modules=["q_proj"]).validate(sparse_geometry())


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "gate"]], ids=str)
def test_a_router_that_two_fields_select_is_taken_as_a_parameter(targets: object) -> None:
    """As PEFT does: the router is no linear in transformers 5."""
    router = Module("model.layers.0.block_sparse_moe.gate", "linear", HIDDEN, NUM_EXPERTS, False)
    plain = sparse_geometry()
    name = f"{PREFIX}model.layers.0.mlp.gate"
    pair = {
        f"{name}.lora_A.weight": Tensor("F32", (RANK, HIDDEN)),
        f"{name}.lora_B.weight": Tensor("F32", (NUM_EXPERTS, RANK)),
    }
    adapter = Adapter().with_config(target_modules=targets, target_parameters=["gate.weight"])
    geometry = replace(plain, modules=(*plain.modules, router))
    report = adapter.with_tensors(pair).validate(geometry, allow_missing=True)
    assert router.name in {module.name for module in report.modules if module.rank}


@pytest.mark.parametrize(
    ("own", "in_files"),
    [
        ("mlp.shared_experts.up_proj", "mlp.shared_mlp.up_proj"),
        ("mlp.gate", "mlp.router.gate"),
        ("mlp.gate", "block_sparse_moe.gate"),
        ("mlp.router", "block_sparse_moe.gate"),
        ("block_sparse_moe.router", "block_sparse_moe.router.layer"),
        ("mlp.router.gate", "mlp.router.gate"),
        ("block_sparse_moe.gate", "block_sparse_moe.gate"),
    ],
)
def test_a_module_may_have_the_name_of_transformers_5_or_that_of_the_files(
    own: str, in_files: str
) -> None:
    """PEFT's `all-linear` writes complete names to the config."""
    name = f"model.layers.0.{own}"
    plain = tiny_geometry()
    attention = [module for module in plain.modules if ".mlp." not in module.name]
    module = Module(f"model.layers.0.{in_files}", "linear", HIDDEN, WIDTH, False)
    geometry = replace(plain, modules=(*attention, module))
    adapter = Adapter().with_tensors(
        {
            f"{PREFIX}{name}.lora_A.weight": Tensor("F32", (7, HIDDEN)),
            f"{PREFIX}{name}.lora_B.weight": Tensor("F32", (WIDTH, 7)),
        }
    )
    adapter = adapter.with_config(
        target_modules=["q_proj", "v_proj", name], rank_pattern={own: 7}, alpha_pattern={own: 14}
    )
    found = {m.name: m for m in adapter.validate(geometry, strict=True).modules}
    assert (found[module.name].rank, found[module.name].scale) == (7, 2.0)


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_whole_experts_in_modules_to_save_are_refused_with_the_way_out(parameter: str) -> None:
    name = f"{CONTAINER}.{parameter}"
    shape = (NUM_EXPERTS, 2 * WIDTH, HIDDEN)
    adapter = Adapter().with_config(modules_to_save=["experts"])
    with pytest.raises(InvalidAdapter, match="target_parameters") as refused:
        adapter.with_tensors({name: Tensor("F32", shape)}).validate(sparse_geometry())
    assert name in refused.value.violations[0].field


def shared_expert_adapter(*trained: str) -> tuple[Adapter, Geometry]:
    """One whose target_modules name both a linear of a shared expert and those of the experts."""
    plain = tiny_geometry("qwen2_moe")
    names = [f"model.layers.0.mlp.experts.{index}.gate_proj" for index in range(NUM_EXPERTS)]
    names.append("model.layers.0.mlp.shared_expert.gate_proj")
    linears = [Module(name, "linear", HIDDEN, WIDTH, False) for name in names]
    tensors = {}
    for name in trained:
        tensors[f"{PREFIX}{name}.lora_A.weight"] = Tensor("F32", (RANK, HIDDEN))
        tensors[f"{PREFIX}{name}.lora_B.weight"] = Tensor("F32", (WIDTH, RANK))
    adapter = Adapter().with_config(target_modules=["q_proj", "v_proj", "gate_proj"])
    attention = [module for module in plain.modules if ".mlp." not in module.name]
    return adapter.with_tensors(tensors), replace(plain, modules=(*attention, *linears))


def test_experts_that_transformers_5_does_not_train_by_their_names_are_not_missing() -> None:
    adapter, geometry = shared_expert_adapter("model.layers.0.mlp.shared_expert.gate_proj")
    report = adapter.validate(geometry, strict=True)
    assert "model.layers.0.mlp.shared_expert.gate_proj" in {m.name for m in report.modules}


def test_an_expert_that_is_missing_among_trained_ones_is_refused() -> None:
    adapter, geometry = shared_expert_adapter(
        "model.layers.0.mlp.shared_expert.gate_proj", "model.layers.0.mlp.experts.0.gate_proj"
    )
    with pytest.raises(InvalidAdapter, match=r"no tensors, such as .*experts\.1\.gate_proj"):
        adapter.validate(geometry)
