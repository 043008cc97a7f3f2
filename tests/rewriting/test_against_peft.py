"""Merged adapters equal those of PEFT's `add_weighted_adapter`, value for value, in float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from loraplex.adapter_format import Geometry, geometry_from_folder
from loraplex.rewriting import merging
from loraplex.rewriting.merging import Recipe, merge, without_initial
from tests.adapter_format.peft_parity import models

WEIGHTS = (0.7, -0.4, 1.3)
RECIPES = [
    Recipe("linear"),
    Recipe("cat"),
    *(
        Recipe(method, density, majority, seed=5)
        for method in ("ties", "dare_ties")
        for density, majority in ((0.3, "total"), (0.6, "frequency"), (1.0, "total"))
    ),
    Recipe("dare_linear", 0.4, seed=9),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def geometry(base: Path) -> Geometry:
    return geometry_from_folder(base)


def _random_b(model: torch.nn.Module, seed: int) -> None:
    """PEFT starts with B = 0, which would compare nothing."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=random) / 8


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of one rank whose scales and modules differ."""
    folder = tmp_path_factory.mktemp("adapters")
    configs: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 8},
        {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 3, "use_rslora": True},
        {"target_modules": ["q_proj", "v_proj", "embed_tokens"], "lora_alpha": 5},
    ]
    for index, config in enumerate(configs):
        model = get_peft_model(
            models.build("llama"), LoraConfig(r=4, task_type="CAUSAL_LM", **config)
        )
        _random_b(model, index)
        model.peft_config["default"].base_model_name_or_path = "tiny/llama"
        model.save_pretrained(folder / str(index), save_embedding_layers=False)
    return [folder / str(index) for index in range(len(configs))]


def _products(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    """What an adapter adds to each module's weight."""
    return {
        name: module.get_delta_weight(adapter)
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
        and (adapter in module.lora_A or adapter in module.lora_embedding_A)
    }


def _masks(model: PeftModel, names: list[str], recipe: Recipe) -> Iterator[torch.Tensor]:
    """What our recipe keeps, in the order in which PEFT asks."""
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer) or "merged" not in {
            *module.lora_A, *module.lora_embedding_A
        }:  # fmt: skip
            continue
        name = path.removeprefix("base_model.model.")
        held = [n for n in names if n in module.lora_A or n in module.lora_embedding_A]
        for part in ("A", "B"):
            for adapter in held:
                linear = getattr(module, f"lora_{part}")
                embedding = getattr(module, f"lora_embedding_{part}")
                tensor = linear[adapter].weight if adapter in linear else embedding[adapter]
                values = tensor.detach().numpy()
                side = merging._Side(values, values, 1.0, names.index(adapter))
                yield torch.from_numpy(merging._kept(recipe, side, f"{name}.{part}", values)())


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_every_method_gives_what_peft_gives(
    adapters: list[Path],
    geometry: Geometry,
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = list(zip(adapters, WEIGHTS, strict=True))
    merge(folders, tmp_path / "out", recipe, geometry)
    names = [f"a{index}" for index in range(len(adapters))]
    model = PeftModel.from_pretrained(models.build("llama"), adapters[0], adapter_name=names[0])
    for name, folder in zip(names[1:], adapters[1:], strict=True):
        model.load_adapter(folder, adapter_name=name)
    masks = _masks(model, names, recipe)
    monkeypatch.setattr(torch, "bernoulli", lambda input: next(masks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_weighted_adapter(
            names,
            list(WEIGHTS),
            "merged",
            combination_type=recipe.method,
            density=recipe.density,
            majority_sign_method=recipe.majority,
        )
    monkeypatch.undo()
    ours = PeftModel.from_pretrained(models.build("llama"), tmp_path / "out", adapter_name="ours")
    wanted, got = _products(model, "merged"), _products(ours, "ours")
    assert wanted.keys() == got.keys()
    assert any(product.abs().max() > 0.01 for product in wanted.values())
    for name, product in wanted.items():
        torch.testing.assert_close(got[name], product, rtol=1e-5, atol=1e-6)


def test_cat_is_the_weighted_sum_of_the_products(
    adapters: list[Path], geometry: Geometry, tmp_path: Path
) -> None:
    report = merge(
        list(zip(adapters, WEIGHTS, strict=True)), tmp_path / "out", Recipe("cat"), geometry
    )
    assert {module.rank for module in report.modules} == {4, 8, 12}
    got = _products(
        PeftModel.from_pretrained(models.build("llama"), tmp_path / "out", adapter_name="x"), "x"
    )
    total = {name: torch.zeros_like(product) for name, product in got.items()}
    for folder, weight in zip(adapters, WEIGHTS, strict=True):
        one = PeftModel.from_pretrained(models.build("llama"), folder, adapter_name="x")
        for name, product in _products(one, "x").items():
            total[name] += weight * product
    for name, product in got.items():
        torch.testing.assert_close(product, total[name], rtol=1e-5, atol=1e-6)


def test_a_pissa_adapter_becomes_the_plain_lora_that_peft_makes_of_it(
    base: Path, geometry: Geometry, tmp_path: Path
) -> None:
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj"], init_lora_weights="pissa",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(models.build("llama"), config)
    model.save_pretrained(tmp_path / "initial")
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn(parameter.shape, generator=random) / 16
    model.save_pretrained(tmp_path / "trained")
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(
        tmp_path / "by-peft", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    report = without_initial(tmp_path / "trained", tmp_path / "initial", tmp_path / "out", geometry)
    assert report.max_rank == 8
    loaded = {
        folder: PeftModel.from_pretrained(
            models.build("llama"), tmp_path / folder, adapter_name="x"
        )
        for folder in ("out", "by-peft")
    }
    wanted, got = _products(loaded["by-peft"], "x"), _products(loaded["out"], "x")
    assert wanted.keys() == got.keys()
    for name, product in wanted.items():
        torch.testing.assert_close(got[name], product, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("llama", {"use_dora": True}),
        ("llama", {"modules_to_save": ["lm_head", "input_layernorm"]}),
        ("llama", {"trainable_token_indices": [3, 5]}),
        ("llama-tied-bias", {"bias": "lora_only"}),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),
        ("llama-tied-bias", {"target_modules": ["q_proj", "lm_head"]}),
    ],
    ids=str,
)
def test_what_a_pissa_adapter_trains_beside_its_matrices_stays(
    family: str, others: dict[str, Any], tmp_path: Path
) -> None:
    """PEFT's own conversion fails on these, or leaves out what is not A or B."""
    fields = {"target_modules": ["q_proj", "down_proj"], **others}
    config = LoraConfig(
        r=4, lora_alpha=6, init_lora_weights="pissa", task_type="CAUSAL_LM", **fields
    )
    model = get_peft_model(models.build(family), config)
    model.save_pretrained(tmp_path / "initial")
    random = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=random) / 4
    model.save_pretrained(tmp_path / "trained")
    geometry = geometry_from_folder(models.save(family, tmp_path))
    without_initial(tmp_path / "trained", tmp_path / "initial", tmp_path / "out", geometry)
    loaded = PeftModel.from_pretrained(models.build(family), tmp_path / "out")
    prompt = torch.arange(12)[None]
    with torch.inference_mode():
        wanted, got = model.eval()(prompt).logits, loaded.eval()(prompt).logits
        assert not torch.allclose(models.build(family)(prompt).logits, wanted, atol=0.05)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
