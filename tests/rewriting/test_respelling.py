"""Adapters that are not spelt as PEFT spells them become the adapter that they are."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.adapter_format import geometry_from_folder
from loraplex.errors import InvalidAdapter
from loraplex.rewriting.respelling import from_tinker, is_tinker, text_only
from loraplex.rewriting.tensors import check_folder
from tests.worker.parity.bases import TinyBase, make_base

PREFIX = "base_model.model."
RANK, ALPHA = 3, 6
Deltas = dict[str, Tensor]
"""What is added to the parameters of transformers' model, by name."""


class Export:
    """Tensors as Tinker names them, and what they add to which parameter."""

    def __init__(self, base: TinyBase) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.parameters = dict(base.model.named_parameters())
        self.tensors: dict[str, Tensor] = {}
        self.deltas: Deltas = {}

    def draw(self, module: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> Tensor:
        """The product of a new pair, with the scale."""
        a, b = (0.2 * torch.randn(s, generator=self.generator) for s in (a_shape, b_shape))
        self.tensors |= {
            f"{PREFIX}{module}.lora_A.weight": a,
            f"{PREFIX}{module}.lora_B.weight": b,
        }
        return b @ a * ALPHA / RANK

    def linear(self, module: str, parameter: str, rows: slice = slice(None)) -> None:
        weight = self.parameters[parameter]
        delta = self.deltas.setdefault(parameter, torch.zeros_like(weight))
        out = delta[rows].shape[0]
        delta[rows] += self.draw(module, (RANK, weight.shape[1]), (out, RANK))

    def experts(self, container: str, *, gpt_oss: bool) -> None:
        """Gates and ups share A, and down projections share B, as Tinker has them."""
        gate_up, down = (
            self.parameters[f"{container}.{name}"] for name in ("gate_up_proj", "down_proj")
        )
        num_experts, width, inner = (
            (len(down), down.shape[2], down.shape[1])
            if gpt_oss
            else (len(down), down.shape[1], down.shape[2])
        )
        shared = (1, RANK, width), (num_experts, inner, RANK)
        gates, ups = (self.draw(f"{container}.{name}", *shared) for name in ("w1", "w3"))
        downs = self.draw(f"{container}.w2", (num_experts, RANK, inner), (1, width, RANK))
        both = torch.stack((gates, ups), 2).flatten(1, 2) if gpt_oss else torch.cat((gates, ups), 1)
        self.deltas[f"{container}.gate_up_proj"] = both.mT if gpt_oss else both
        self.deltas[f"{container}.down_proj"] = downs.mT if gpt_oss else downs
        assert self.deltas[f"{container}.gate_up_proj"].shape == gate_up.shape

    def write(self, folder: Path, **config: object) -> Path:
        folder.mkdir()
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, folder / TENSORS)
        fields = {"r": RANK, "lora_alpha": ALPHA, "peft_type": "LORA", **config}
        (folder / CONFIG).write_text(json.dumps(fields))
        return folder


TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_of(base: TinyBase) -> Export:
    """On every kind of module that the base has."""
    export = Export(base)
    is_gpt_oss = base.name == "gpt-oss"
    for name, weight in list(export.parameters.items()):
        module = name.removesuffix(".weight")
        if name.endswith("in_proj_qkv.weight"):
            config, end = base.model.config.get_text_config(), weight.shape[0]
            key = config.linear_num_key_heads * config.linear_key_head_dim
            rows = {"q": slice(0, key), "k": slice(key, 2 * key), "v": slice(2 * key, end)}
            for part, own in rows.items():
                export.linear(f"{module.removesuffix('qkv')}{part}", name, own)
        elif name.endswith(("q_proj.weight", "shared_expert.up_proj.weight", "out_proj.weight")):
            renamed = module.replace(".self_attn.", ".attn.") if is_gpt_oss else module
            export.linear(renamed, name)
        elif name == "lm_head.weight":
            body = "model.language_model" if base.is_multimodal else "model"
            export.linear(f"{body}.unembed_tokens", name)
        elif name.endswith("experts.down_proj"):
            export.experts(name.removesuffix(".down_proj"), gpt_oss=is_gpt_oss)
    return export


def logits(model: torch.nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([[5, 9, 44, 7, 120, 3, 77]])).logits


def merged(base: TinyBase, deltas: Mapping[str, Tensor]) -> torch.nn.Module:
    model = copy.deepcopy(base.model)
    for name, parameter in model.named_parameters():
        if name in deltas:
            parameter.data += deltas[name]
    return model


@pytest.mark.parametrize("name", ["qwen3.5-moe", "gpt-oss"])
@pytest.mark.filterwarnings("ignore")
def test_an_export_of_tinker_computes_in_peft_what_its_deltas_add_to_the_base(
    name: str, tmp_path: Path
) -> None:
    base = make_base(name, tmp_path / "base")
    export = export_of(base)
    folder = export.write(tmp_path / "export")
    assert is_tinker(folder)
    from_tinker(folder, tmp_path / "out", geometry_from_folder(base.folder))
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path / "out")
    expected = logits(merged(base, export.deltas))
    assert (logits(model) - expected).abs().max() < 1e-3
    assert (logits(base.model) - expected).abs().max() > 0.1
    assert not is_tinker(tmp_path / "out")


def test_each_dtype_and_every_other_file_is_kept(tmp_path: Path) -> None:
    folder = llama_export(tmp_path / "export", torch.bfloat16)
    (folder / "README.md").write_text("# hello")
    from_tinker(folder, tmp_path / "out")
    before, after = load_file(folder / TENSORS), load_file(tmp_path / "out" / TENSORS)
    assert torch.equal(after[f"{PREFIX}lm_head.lora_B.weight"], before[f"{UNEMBED}.lora_B.weight"])
    assert (tmp_path / "out" / "README.md").read_text() == "# hello"


UNEMBED = f"{PREFIX}model.unembed_tokens"
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


def llama_export(folder: Path, dtype: torch.dtype = torch.float32, **others: Tensor) -> Path:
    """A linear and the head; `others` by name, with __ for dots."""
    tensors = {
        f"{module}.lora_{side}.weight": torch.ones(shape, dtype=dtype)
        for module in (Q, UNEMBED)
        for side, shape in (("A", (2, 8)), ("B", (8, 2)))
    }
    tensors |= {PREFIX + name.replace("__", "."): tensor for name, tensor in others.items()}
    folder.mkdir()
    save_file(tensors, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps({"r": 2, "lora_alpha": 4, "peft_type": "LORA"}))
    return folder


DELTA_NET = "model__layers__0__linear_attn__in_proj_"
EXPERTS = "model__layers__0__mlp__experts__w1__lora_"


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"model__layers__0__self_attn__k_proj__lora_A__weight": torch.ones(2, 8)}, "counterpart"),
        ({"model__norm__weight": torch.ones(8)}, "counterpart"),
        (
            {
                f"{DELTA_NET}q__lora_A__weight": torch.ones(2, 8),
                f"{DELTA_NET}q__lora_B__weight": torch.ones(8, 2),
            },
            "is missing, so that the outputs of in_proj_qkv",
        ),
        (
            {
                f"{EXPERTS}A__weight": torch.ones(2, 8),
                f"{EXPERTS}B__weight": torch.ones(8, 2),
            },
            "must be 3-dimensional",
        ),
        (
            {
                f"{EXPERTS}A__weight": torch.ones(3, 2, 8),
                f"{EXPERTS}B__weight": torch.ones(4, 8, 2),
            },
            "must have 1 or 4 experts",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    others: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    folder = llama_export(tmp_path / "export", **others)
    with pytest.raises(InvalidAdapter, match=message):
        from_tinker(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_an_export_without_rank_or_alpha_is_refused(field: str, tmp_path: Path) -> None:
    folder = llama_export(tmp_path / "export")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, field: None}))
    with pytest.raises(InvalidAdapter, match=field):
        from_tinker(folder, tmp_path / "out")


def with_tower(folder: Path) -> Path:
    """An adapter of the text model and of the vision tower."""
    names = (Q, f"{PREFIX}model.visual.blocks.0.attn.qkv")
    tensors = {
        f"{module}.lora_{side}.weight": torch.rand(shape).half()
        for module in names
        for side, shape in (("A", (2, 8)), ("B", (8, 2)))
    }
    folder.mkdir()
    save_file(tensors, folder / TENSORS)
    config = {"r": 2, "lora_alpha": 4, "peft_type": "LORA", "target_modules": ["q_proj", "qkv"]}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def test_text_only_leaves_towers_out_and_says_so(tmp_path: Path) -> None:
    folder = with_tower(tmp_path / "both")
    assert text_only(folder, tmp_path / "text")
    before, after = load_file(folder / TENSORS), load_file(tmp_path / "text" / TENSORS)
    assert after.keys() == {name for name in before if name.startswith(Q)}
    assert all(torch.equal(after[name], before[name]) for name in after)
    [warning] = check_folder(tmp_path / "text").warnings
    assert warning.field == "adapter_config.json:conversion.dropped" and warning.value == "1"
    assert not text_only(tmp_path / "text", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_adapter_of_a_tower_alone_is_refused(tmp_path: Path) -> None:
    folder = with_tower(tmp_path / "both")
    tensors = load_file(folder / TENSORS)
    save_file({k: v for k, v in tensors.items() if "visual" in k}, folder / TENSORS)
    with pytest.raises(InvalidAdapter, match="nothing of the text model is left"):
        text_only(folder, tmp_path / "text")


@pytest.mark.parametrize(
    "value",
    [
        "LOHA",
        {"method": "LOHA"},
        {"dropped": 0, "method": "", "relative_error": 0.0},
        {"dropped": 0, "method": "LOHA", "relative_error": -1.0},
        {"dropped": True, "method": "LOHA", "relative_error": 0.0},
        {"dropped": 0, "method": "LOHA", "relative_error": 0.0, "note": "x"},
    ],
)
def test_a_conversion_field_that_no_command_writes_is_refused(
    value: object, tmp_path: Path
) -> None:
    folder = with_tower(tmp_path / "both")
    text_only(folder, tmp_path / "text")
    config = json.loads((tmp_path / "text" / CONFIG).read_text())
    (tmp_path / "text" / CONFIG).write_text(json.dumps({**config, "conversion": value}))
    with pytest.raises(InvalidAdapter, match="conversion"):
        check_folder(tmp_path / "text")
