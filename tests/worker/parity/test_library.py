"""Bases that run through the transformers library, and what is refused there by name."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from loraplex.adapter_format.base_types import (
    LIBRARY_TYPES,
    NATIVE_TYPES,
    TIED_TYPES,
    check_served_type,
)
from loraplex.adapter_format.geometry import geometry_from_folder
from loraplex.errors import InvalidAdapter, InvalidRequest, Unsupported
from loraplex_services.worker.layers.library_modules import are_gated_experts
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model.library import build_library_model
from loraplex_services.worker.runner.building import build_runner
from tests.worker.parity.adapters import adapter_on, make_adapter
from tests.worker.parity.base_fields import COMMON
from tests.worker.parity.bases import LIBRARY_BASES, config_of, make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.quantised import quantised_base
from tests.worker.parity.suite import (
    Stage,
    check_mixed_batch,
    make_jobs,
    random_prompt,
    set_library_stage,
)

ROOT = Path(__file__).parents[3]
DAILY = {"cohere2", "gemma", "falcon", "llama4", "glm4-moe-lite"}
OF_BOTH = ("qwen3", "gpt-oss", "gemma4-all")
"""Families that have code here, too: the library's class is served as well."""


def library_runner(folder: Path, **settings: object):
    return build_runner(
        folder,
        device="cpu",
        dtype="float32",
        arena_bytes=32 << 20,
        **{"model_impl": "transformers", **settings},
    )


def params() -> list[object]:
    names = [*LIBRARY_BASES, *OF_BOTH]
    return [pytest.param(n, marks=[pytest.mark.long] * (n not in DAILY)) for n in names]


@pytest.fixture(scope="module", params=params())
def stage(request, tmp_path_factory) -> Stage:
    return set_library_stage(request.param, tmp_path_factory.mktemp(request.param))


def test_mixed_batch_equals_peft_token_for_token(stage, near_ties):
    check_mixed_batch(stage, near_ties, 24)


def test_mixed_batch_equals_each_request_alone(stage):
    together = make_jobs(stage, 2, 10, stagger=True)
    alone = make_jobs(stage, 2, 10, stagger=False)
    outputs = stage.driver.run([job for _, job in together], chunk=23)
    for (name, job), expected in zip(alone, outputs, strict=True):
        assert stage.driver.run([job]) == [expected], name


def test_adapters_change_what_the_base_says(stage):
    prompt = random_prompt(random.Random(3))
    jobs = [Job(greedy("base", prompt, 8))]
    jobs += [Job(greedy(name, prompt, 8), ((slot, 1.0),)) for name, slot in stage.slots.items()]
    outputs = stage.driver.run(jobs)
    assert len({tuple(output) for output in outputs}) == len(outputs)


def save(class_name: str, folder: Path, **changes: object) -> Path:
    config = getattr(transformers, class_name)(**{**COMMON, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("class_name", "changes"),
    [
        ("AfmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 17}),
        ("GPTBigCodeConfig", {"n_inner": 96}),
    ],
    ids=["a view of what attention returns", "n_layer"],
)
def test_other_classes_are_served_without_being_known_by_name(class_name, changes, tmp_path):
    folder = save(class_name, tmp_path, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = random_prompt(random.Random(3))
    (tokens,) = Driver(library_runner(folder)).run([Job(greedy("base", prompt, 8))])
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        expected = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert tokens == expected.tolist()


@pytest.mark.parametrize(
    ("class_name", "changes", "reason"),
    [
        ("BloomConfig", {}, "'bloom' computes attention in a way .* lists the types"),
        ("FalconConfig", {"alibi": True}, "add no biases to scores"),
        ("Llama4TextConfig", {"attention_chunk_size": None}, "is required by chunked_attention"),
        ("DogeConfig", {"num_experts": 2}, "attention_mask"),
        ("MambaConfig", {}, "layers of type '[a-z_]+' are"),
        ("GraniteMoeHybridConfig", {"mamba_n_heads": 8}, "layers of type '[a-z_]+' are"),
        ("HeliumConfig", {"head_dim": 32}, "cannot be run in this way: mat1 and mat2"),
        ("BertConfig", {}, "not plain causal self-attention"),
        ("Qwen3NextConfig", {"num_experts": 2, "head_dim": 16}, "'linear_attention'"),
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type",
        ),
    ],
)
def test_classes_that_cannot_be_served_are_refused_naming_the_reason(
    class_name, changes, reason, tmp_path
):
    with pytest.raises(Unsupported, match=reason):
        library_runner(save(class_name, tmp_path, **changes))


def test_the_types_that_can_be_registered_are_those_that_are_compared_here():
    compared = {config_of(name).get_text_config().model_type for name in LIBRARY_BASES}
    assert compared == LIBRARY_TYPES


def test_a_base_with_recurrent_layers_is_not_registered_as_one_of_a_type_that_may_lack_them(
    tmp_path,
):
    dense = geometry_from_folder(make_base("granite-4-dense", tmp_path / "dense").folder)
    check_served_type(dense.model_type, (module.name for module in dense.modules))
    recurrent = geometry_from_folder(
        save("GraniteMoeHybridConfig", tmp_path / "hybrid", mamba_n_heads=8)
    )
    with pytest.raises(InvalidRequest, match=r"layers\.0\.mamba\..* recurrent layer"):
        check_served_type(recurrent.model_type, (module.name for module in recurrent.modules))


def test_the_page_of_bases_lists_the_types_that_can_be_registered():
    page = (ROOT / "docs/reference/bases.md").read_text(encoding="utf-8")
    assert [name for name in sorted(LIBRARY_TYPES | NATIVE_TYPES) if f"`{name}`" not in page] == []


def test_types_whose_head_is_the_embedding_by_default_are_those_of_the_library():
    defaults = transformers.CONFIG_MAPPING
    tied = {t for t in LIBRARY_TYPES | NATIVE_TYPES if defaults[t]().tie_word_embeddings}
    assert tied == TIED_TYPES


def test_a_multimodal_base_is_refused_by_name(tmp_path):
    base = make_base("llava", tmp_path)
    with pytest.raises(Unsupported, match="multimodal"):
        library_runner(base.folder)


def test_a_type_that_the_library_does_not_know_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(InvalidRequest, match="nonesuch"):
        library_runner(tmp_path, model_impl="auto")


def test_weights_that_the_library_would_make_up_are_refused_by_name(tmp_path):
    file = save("GraniteConfig", tmp_path) / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=re.escape(name)):
        library_runner(tmp_path, model_impl="auto")
    config = json.loads((tmp_path / "config.json").read_text())
    save_file({**tensors, name: torch.zeros(7, config["hidden_size"])}, file)
    with pytest.raises(InvalidRequest, match="asks for shape"):
        library_runner(tmp_path, model_impl="auto")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InvalidRequest, match=r"model\.safetensors"):
        library_runner(tmp_path, model_impl="auto")


def test_a_head_that_is_not_the_embedding_to_which_it_is_tied_is_refused_by_name(tmp_path):
    """The library leaves both as they are, and PEFT adapts the head as if it were the embedding."""
    save("Ernie4_5Config", tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]  # true for this type
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="differs from the embedding"):
        library_runner(tmp_path, model_impl="auto")


def test_a_quantised_base_is_refused_by_the_tensor_that_does_not_fit_its_config(tmp_path):
    base = quantised_base(make_base("granite", tmp_path / "plain"), "fp8-blocks", tmp_path / "base")
    file = base.folder / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.self_attn.q_proj.weight_scale_inv"
    save_file({**tensors, name: tensors[name] * float("inf")}, file)
    with pytest.raises(InvalidRequest, match=re.escape(name)):
        library_runner(base.folder)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.int8)}, file)
    with pytest.raises(InvalidRequest, match=r"model\.norm\.weight.*does not explain"):
        library_runner(base.folder)


def test_a_quantised_base_that_takes_more_memory_than_is_free_is_refused(tmp_path):
    base = quantised_base(make_base("granite", tmp_path / "plain"), "fp8-blocks", tmp_path / "base")
    with pytest.raises(InvalidRequest, match=r"takes .* bytes in bfloat16"):
        build_library_model(base.folder, torch.bfloat16, torch.device("cpu"), Operators(), 1)


def test_code_from_the_hub_is_not_run(tmp_path):
    config = {"model_type": "nonesuch", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(InvalidRequest):
        library_runner(tmp_path, model_impl="auto")


def test_without_the_library_the_way_to_install_it_is_named(tmp_path, monkeypatch):
    folder = save("GraniteConfig", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Unsupported, match="pip install"):
        library_runner(folder, model_impl="auto")


def test_native_alone_refuses_what_has_no_family_here(tmp_path):
    with pytest.raises(Unsupported, match="not served by this build"):
        library_runner(save("GraniteConfig", tmp_path), model_impl="native")


def test_adapters_that_train_norms_or_bring_a_rope_are_refused_by_name(tmp_path):
    base = make_base("granite", tmp_path / "base")
    driver = Driver(library_runner(base.folder))
    norms = make_adapter(base, "saved-norms", tmp_path / "norms")
    with pytest.raises(InvalidAdapter, match="workers cannot adapt"):
        driver.load(0, norms)
    rope = make_adapter(base, "rank-1", tmp_path / "rope")
    config = json.loads((rope / "adapter_config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (rope / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidAdapter, match="transformers library"):
        driver.load(0, rope)


def test_experts_are_adapted_only_if_their_class_computes_what_the_config_says():
    model = transformers.AutoModelForCausalLM.from_config(config_of("olmoe"))
    experts = model.model.layers[0].mlp.experts
    assert are_gated_experts(experts, "silu")
    assert not are_gated_experts(experts, "gelu")
    assert not are_gated_experts(experts, None)
    assert not are_gated_experts(model.model.layers[0].mlp.gate, "silu")


def test_a_router_that_is_a_subclass_of_a_linear_is_adapted(tmp_path):
    base = make_base("phimoe", tmp_path / "base")
    adapter = adapter_on(base, tmp_path / "adapter", target_parameters=["mlp.router.weight"])
    driver = Driver(library_runner(base.folder))
    driver.load(0, adapter)
    prompt = random_prompt(random.Random(3))
    jobs = [Job(greedy("base", prompt, 8)), Job(greedy("adapted", prompt, 8), ((0, 1.0),))]
    assert len(set(map(tuple, driver.run(jobs)))) == 2


def test_adapters_on_routers_that_compute_more_than_a_product_are_refused_by_name(tmp_path):
    base = make_base("gpt-oss", tmp_path / "base")
    adapter = adapter_on(base, tmp_path / "adapter", target_parameters=["mlp.router.weight"])
    driver = Driver(library_runner(base.folder))
    with pytest.raises(InvalidAdapter, match=r"mlp\.router: .* workers cannot adapt"):
        driver.load(0, adapter)


def test_a_device_without_support_is_refused_by_name(tmp_path):
    with pytest.raises(Unsupported, match="on CPUs only"):
        build_library_model(tmp_path, torch.float32, torch.device("cuda"), Operators(), 0)
