"""Adapters of other PEFT methods become LoRA, and the error that is told is the error."""

from __future__ import annotations

import copy
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.adapter_format.config_fields import WITHOUT_LORA
from loraplex.cli.local_base import base_folder
from loraplex.cli.sources import adapter_folder
from loraplex.errors import InvalidAdapter, InvalidRequest
from loraplex.rewriting import child, other_methods_process
from loraplex.rewriting.other_methods import Converted, is_other_method, named_base, to_lora
from loraplex.rewriting.tensors import check_folder
from tests.adapter_format.peft_parity import models
from tests.worker.parity.bases import make_base

TARGETS = ["q_proj", "v_proj", "down_proj"]
METHODS: dict[str, peft.PeftConfig] = {
    "LOHA": peft.LoHaConfig(r=3, alpha=5, target_modules=TARGETS),
    "LOKR": peft.LoKrConfig(r=3, target_modules=TARGETS),
    "MISS": peft.MissConfig(r=4, target_modules=TARGETS),
    "VERA": peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "RANDLORA": peft.RandLoraConfig(r=4, target_modules=TARGETS),
    "C3A": peft.C3AConfig(block_size=4, target_modules=TARGETS),
    "FOURIERFT": peft.FourierFTConfig(n_frequency=30, target_modules=TARGETS),
    "DELORA": peft.DeloraConfig(r=4, target_modules=TARGETS),
    "GRALORA": peft.GraloraConfig(r=4, target_modules=TARGETS),
    "WAVEFT": peft.WaveFTConfig(n_frequency=30, target_modules=TARGETS),
    "HIRA": peft.HiraConfig(r=4, target_modules=TARGETS),
    "SHIRA": peft.ShiraConfig(r=4, target_modules=TARGETS),
    "OFT": peft.OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS),
    "IA3": peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "BEFT": peft.BeftConfig(target_modules=TARGETS),
}
if find_spec("sklearn"):  # which AdaMSS needs for its clusters
    METHODS["ADAMSS"] = peft.AdamssConfig(r=4, num_subspaces=2, target_modules=TARGETS)
RANKS = {"LOHA": 9, "MISS": 4, "VERA": 4, "DELORA": 4}
"""Of methods whose weights have a rank of their own."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder, model = tmp_path_factory.mktemp("base"), models.build("llama")
    model.save_pretrained(folder)
    return folder, model


def saved(method: str, model: torch.nn.Module, folder: Path) -> Path:
    """A random adapter, as PEFT writes it."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(model), METHODS[method])
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return folder


def logits(model: torch.nn.Module, folder: Path | None = None) -> Tensor:
    adapted = copy.deepcopy(model)
    if folder is not None:
        adapted = peft.PeftModel.from_pretrained(adapted, folder).eval()
    with torch.inference_mode():
        return adapted(torch.tensor([[3, 7, 1, 12, 5]])).logits


def convert(
    method: str, base: tuple[Path, torch.nn.Module], root: Path, max_rank: int = 256
) -> Converted:
    folder = saved(method, base[1], root / "before")
    return to_lora(folder, root / "after", base[0], max_rank)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["LOHA", "HIRA"])
def test_the_process_writes_the_products_and_tells_their_error(
    method: str,
    base: tuple[Path, torch.nn.Module],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """PEFT converts the first; it does not convert the second."""
    folder = saved(method, base[1], tmp_path / "before")
    other_methods_process.convert(folder, base[0], str(tmp_path / "out"), 256)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    made = load_file(tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (made[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(base[1]), folder).merge_and_unload()
    change = merged.get_submodule(name).weight - base[1].get_submodule(name).weight
    assert (b @ a - change).norm() < 1e-5 * change.norm()
    assert told["relative_error"] < 1e-5 and told["ranks"][name] == len(a)
    assert len(told["ranks"]) == 3 * base[1].config.num_hidden_layers


@pytest.mark.filterwarnings("ignore")
def test_names_of_the_text_model_alone_fit_a_multimodal_base_and_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT leaves a module whose tensors it does not find as if it was never trained."""
    base = make_base("qwen3.5-multimodal", tmp_path / "base")
    text_model = transformers.AutoModelForCausalLM.from_pretrained(base.folder)
    folder = saved("LOHA", text_model, tmp_path / "before")
    arguments = (folder, base.folder, str(tmp_path / "out"), 256)
    other_methods_process.convert(*arguments)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["relative_error"] < 1e-5
    assert set(told["ranks"].values()) == {RANKS["LOHA"]}
    tensors = load_file(folder / "adapter_model.safetensors")
    other = {name.replace(".layers.", ".blocks."): tensor for name, tensor in tensors.items()}
    save_file(other, folder / "adapter_model.safetensors")
    with pytest.raises(SystemExit, match=str(child.REFUSED)):
        other_methods_process.convert(*arguments)
    violation = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert violation["field"] == "adapter_config.json:peft_type"
    assert "layers.0.mlp.down_proj" in violation["description"]


@pytest.mark.filterwarnings("ignore")
def test_a_scaled_bias_of_the_base_becomes_a_bias_of_the_lora(tmp_path: Path) -> None:
    adapted = peft.get_peft_model(models.build("qwen2"), METHODS["IA3"])
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    for tensor in (layer.ia3_l["default"], layer.get_base_layer().bias):
        torch.nn.init.normal_(tensor)
    update, bias = other_methods_process._added(layer, METHODS["IA3"])
    x = torch.randn(3, update.shape[1])
    expected = layer(x) - layer.get_base_layer()(x)
    torch.testing.assert_close(x @ update.float().T + bias, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_casts_its_inputs_is_computed_in_float64_like_any_other() -> None:
    """AdaMSS does."""
    config = METHODS["IA3"]
    layer = peft.get_peft_model(models.build("llama"), config).base_model.model.model.layers[0]
    module = layer.self_attn.q_proj
    plain = other_methods_process._added(module, config)
    module.dtype = torch.float32
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.dtype),))
    update, bias = other_methods_process._added(module, config)
    assert update.equal(plain[0]) and bias.equal(plain[1])
    assert module.dtype is module.weight.dtype is torch.float32


@pytest.mark.filterwarnings("ignore")
def test_a_method_that_is_not_linear_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = METHODS["IA3"]
    layer = peft.get_peft_model(models.build("llama"), config).base_model.model.model.layers[0]
    module = layer.self_attn.q_proj
    module.register_forward_hook(lambda _, inputs, output: output + 0.1 * inputs[0].tanh().sum())
    with pytest.raises(SystemExit):
        other_methods_process._added(module, config)
    assert "not linear" in json.loads(capsys.readouterr().err.splitlines()[-1])["description"]


@pytest.mark.parametrize("method", WITHOUT_LORA)
def test_a_method_that_no_lora_equals_is_refused_before_the_base_is_loaded(
    method: str, tmp_path: Path
) -> None:
    folder = tmp_path / "before"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": method}))
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(InvalidAdapter, match=r"no LoRA is equivalent|are not converted"):
        to_lora(folder, tmp_path / "after", tmp_path / "no-base")


# Each case starts a process that imports torch, transformers and PEFT.
@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore")
def test_the_lora_computes_what_the_other_method_computes(
    method: str, base: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    made = convert(method, base, tmp_path)
    assert made.method == method and made.relative_error < 1e-5
    assert made.report.max_rank == RANKS.get(method, made.report.max_rank)
    assert not made.report.warnings and not is_other_method(tmp_path / "after")
    before, after = (logits(base[1], tmp_path / name) for name in ("before", "after"))
    change = (before - logits(base[1])).norm()
    assert (after - before).norm() < 1e-4 * change


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_an_upload_converts_with_the_base_that_the_adapter_names_if_base_is_only_an_id(
    base: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    folder = saved("LOHA", base[1], tmp_path / "before")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base[0])
    (folder / "adapter_config.json").write_text(json.dumps(config))
    options = {"convert": True, "text_only": False, "strict": False}
    with adapter_folder(str(folder), **options, base="served-id") as converted:
        assert check_folder(converted).max_rank == RANKS["LOHA"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_error_of_too_small_a_rank_is_kept_with_the_adapter(
    base: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    made = convert("FOURIERFT", base, tmp_path, max_rank=3)
    assert made.report.max_rank == 3 and 0.05 < made.relative_error < 1
    [warning] = check_folder(tmp_path / "after").warnings
    assert warning.field == "adapter_config.json:conversion.relative_error"
    assert float(warning.value) == pytest.approx(made.relative_error, rel=0.05)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["nothing"]}, "peft_type"),
    ],
)
def test_what_peft_cannot_convert_is_refused_by_its_field(
    change: dict[str, object], message: str, base: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    folder = saved("LOHA", base[1], tmp_path / "before")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InvalidAdapter, match=message):
        to_lora(folder, tmp_path / "after", base[0])
    assert not (tmp_path / "after").exists()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory")
def test_a_config_that_claims_gigabytes_is_refused(
    base: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    folder = saved("LOHA", base[1], tmp_path / "before")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 10**8}))
    with pytest.raises(InvalidAdapter, match="needs more memory"):
        to_lora(folder, tmp_path / "after", base[0])


@pytest.mark.filterwarnings("ignore")
def test_a_lora_and_an_adapter_that_names_no_base_are_not_converted(
    base: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    folder = saved("LOHA", base[1], tmp_path / "before")
    with pytest.raises(InvalidRequest, match="names no base"):
        base_folder(named_base(folder), {})
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LORA"}))
    with pytest.raises(InvalidRequest, match="other than LoRA"):
        to_lora(folder, tmp_path / "after", base[0])
