"""`registry merge` and `registry convert` by their names, flags and exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "demo"
BASE = str(DEMO / "base")
MASK, UPPER = str(DEMO / "adapters" / "mask"), str(DEMO / "adapters" / "upper")


def test_a_merge_is_an_adapter_of_the_base(offline: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "both")
    merged = offline.json(
        *("merge", f"{MASK}=0.5", f"{UPPER}=-0.5", "--out", out),
        *("--method", "cat", "--base", BASE),
    )
    assert (merged["name"], merged["max_rank"]) == ("both", 12)
    assert offline.json("validate", out, "--base", BASE)["max_rank"] == 12
    assert offline.error("merge", MASK, UPPER, "--out", out, "--method", "cat")[0] == 4


def test_convert_goes_to_tensorrt_llm_and_back(offline: Any, tmp_path: Path) -> None:
    there, back = str(tmp_path / "trt"), str(tmp_path / "back")
    assert offline.json("convert", UPPER, there, "--to", "trtllm")["num_modules"] == 8
    assert offline.error("convert", there, back, "--to", "peft")[1]["violations"][0] == {
        "field": "--base",
        "value": "",
        "description": "is needed: the files do not say how wide the base's modules are",
    }
    offline.json("convert", there, back, "--to", "peft", "--base", BASE)
    assert offline.json("validate", back, "--base", BASE)["max_rank"] == 8


def test_a_merge_into_the_base_is_a_base(offline: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "merged")
    merged = offline.json("merge", UPPER, "--into-base", "--base", BASE, "--out", out)
    assert (merged["name"], merged["max_rank"], merged["is_untied"]) == ("merged", 8, False)
    checked = offline.json("validate", MASK, "--base", out)
    assert checked["digest"] == offline.json("validate", MASK, "--base", BASE)["digest"]
    names = {path.name for path in Path(out).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    again = offline.error("merge", UPPER, "--into-base", "--base", BASE, "--out", out)
    assert again[0] == 4


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("merge", "/no/such", "--out", "{tmp}/o"), 2),
        (("merge", f"{MASK}=much", "--out", "{tmp}/o"), 2),
        (("merge", MASK, UPPER, "--out", "{tmp}/o", "--method", "ties"), 3),
        (("merge", MASK, "--out", "{tmp}/o", "--density", "0"), 2),
        (("merge", MASK, "--into-base", "--out", "{tmp}/o"), 2),
        (("merge", MASK, "--into-base", "--base", "/no/such", "--out", "{tmp}/o"), 2),
        (("merge", MASK, "--into-base", "--base", BASE, "--out", "{tmp}/o", "--method", "ties"), 2),
        (("convert", MASK, "{tmp}/o", "--to", "peft"), 2),
        (("convert", MASK, "{tmp}/o", "--to", "lora", "--base", BASE), 2),
        (("convert", MASK, "{tmp}/o", "--to", "trtllm", "--dtype", "float64"), 2),
        (("convert", "{tmp}", "{tmp}/o", "--to", "trtllm"), 3),
        (("convert", UPPER, "{tmp}/o", "--to", "trtllm", "--rank", "3"), 2),
        (("convert", UPPER, "{tmp}/o", "--to", "trtllm", "--initial", UPPER), 2),
        (("convert", UPPER, __file__, "--to", "trtllm"), 2),
        (("merge", f"{UPPER}=inf", "--out", "{tmp}/o"), 2),
        (("merge", f"{UPPER}=nan", "--out", "{tmp}/o"), 2),
        (("merge", UPPER, "--out", __file__), 2),
    ],
)
def test_what_cannot_be_made_leaves_nothing(
    offline: Any, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    argv = [word.replace("{tmp}", str(tmp_path)) for word in words]
    assert offline.error(*argv)[0] == code
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A demo adapter as PEFT saved it before safetensors."""
    torch = pytest.importorskip("torch")
    folder = tmp_path / "pickled"
    shutil.copytree(UPPER, folder)
    tensors = pytest.importorskip("safetensors.torch").load_file(
        folder / "adapter_model.safetensors"
    )
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    return folder


def test_a_pickle_is_refused_with_the_command_that_converts_it(
    offline: Any, pickled: Path, tmp_path: Path
) -> None:
    code, error = offline.error("validate", str(pickled))
    [violation] = error["violations"]
    assert (code, violation["field"]) == (3, "adapter_model.bin")
    assert "'registry convert DIR OUT --to safetensors'" in violation["description"]
    out = str(tmp_path / "out")
    converted = offline.json("convert", str(pickled), out, "--to", "safetensors", "--base", BASE)
    assert (converted["name"], converted["max_rank"]) == ("out", 8)
    assert offline.json("validate", out, "--base", BASE)["max_rank"] == 8


@pytest.mark.long
@pytest.mark.e2e
def test_an_upload_converts_on_the_way_where_it_is_asked_to(registry: Any, pickled: Path) -> None:
    code, error = registry.error("upload", str(pickled), "--name", "old-upper")
    assert code == 3 and "--convert" in error["violations"][0]["description"]
    checked = registry.json("upload", str(pickled), "--convert", "--name", "old-upper", "--dry-run")
    assert checked["max_rank"] == 8
    published = registry.json("upload", str(pickled), "--convert", "--name", "old-upper")
    again = registry.json("upload", str(pickled), "--convert", "--name", "old-upper")
    assert (published["created"], again["created"]) == (True, False)
    assert sorted(path.name for path in pickled.iterdir()) == sorted(
        "adapter_model.bin" if path.name == "adapter_model.safetensors" else path.name
        for path in Path(UPPER).iterdir()
    )


@pytest.mark.e2e
def test_an_upload_leaves_towers_out_where_it_is_asked_to(registry: Any, tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    folder = tmp_path / "both"
    shutil.copytree(UPPER, folder)
    tensors = numpy.load_file(folder / "adapter_model.safetensors")
    query = next(name for name in tensors if "q_proj.lora_A" in name)
    tower = "base_model.model.model.visual.blocks.0.attn.qkv"
    for side in "AB":
        own = tensors[query.replace("lora_A", f"lora_{side}")]
        tensors[f"{tower}.lora_{side}.weight"] = own
    numpy.save_file(tensors, folder / "adapter_model.safetensors")
    code, error = registry.error("upload", str(folder), "--name", "seeing-upper")
    assert code == 3 and error["violations"][0]["value"] == tower.removeprefix("base_model.model.")
    assert "--text-only" in error["violations"][0]["description"]
    published = registry.json("upload", str(folder), "--text-only", "--name", "seeing-upper")
    [warning] = published["warnings"]
    assert warning["field"] == "adapter_config.json:conversion.dropped" and warning["value"] == "1"
    assert registry.json("show", "seeing-upper")["warnings"] == [warning]
