"""`adapter_model.bin` becomes the safetensors that PEFT would have written, and runs no code."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from loraplex.adapter_format.folder import file_names
from loraplex.errors import AlreadyExists, InvalidAdapter, InvalidRequest
from loraplex.rewriting.pickled import from_pickle, is_pickled
from tests.adapter_format.peft_parity import models

# Each case starts a process that imports torch.
_long = partial(pytest.param, marks=pytest.mark.long)

BIN, TENSORS = "adapter_model.bin", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One adapter, saved by PEFT as a pickle and as safetensors."""
    folder = tmp_path_factory.mktemp("saved")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(models.build("llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "pickled", safe_serialization=False)
    model.save_pretrained(folder / "safe")
    return folder / "pickled", folder / "safe"


def _with_weights(saved: tuple[Path, Path], out: Path, weights: object, **options: object) -> Path:
    shutil.copytree(saved[0], out)
    torch.save(weights, out / BIN, **options)
    return out


def _problem(folder: Path, out: Path) -> str:
    with pytest.raises(InvalidAdapter) as caught:
        from_pickle(folder, out)
    assert not out.exists()
    [violation] = caught.value.violations
    return f"{violation.field} = {violation.value}: {violation.description}"


def test_the_result_is_what_peft_saves_as_safetensors(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    pickled, safe = saved
    assert is_pickled(pickled) and not is_pickled(safe)
    (pickled / "README.md").write_text("# hello")
    report = from_pickle(pickled, tmp_path / "out")
    assert report.max_rank == 4
    assert file_names(tmp_path / "out") == ("README.md", "adapter_config.json", TENSORS)
    ours, theirs = load_file(tmp_path / "out" / TENSORS), load_file(safe / TENSORS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(AlreadyExists):
        from_pickle(pickled, tmp_path / "out")


@pytest.mark.long
def test_files_from_before_torch_1_6_are_read(saved: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(saved[1] / TENSORS)
    old = {"_use_new_zipfile_serialization": False}
    folder = _with_weights(saved, tmp_path / "old", tensors, **old)
    from_pickle(folder, tmp_path / "out")
    ours = load_file(tmp_path / "out" / TENSORS)
    assert all(torch.equal(ours[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", [_long(torch.float16), torch.bfloat16])
def test_dtypes_are_kept_unless_another_one_is_asked_for(
    saved: tuple[Path, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(saved[1] / TENSORS).items()}
    # A transposed view and a shared storage are how real files store some of them.
    tensors = {name: tensor.t().contiguous().t() for name, tensor in tensors.items()}
    folder = _with_weights(saved, tmp_path / "half", tensors)
    from_pickle(folder, tmp_path / "out")
    from_pickle(folder, tmp_path / "cast", dtype="F32")
    kept, cast = (load_file(tmp_path / out / TENSORS) for out in ("out", "cast"))
    assert all(kept[n].dtype == dtype and torch.equal(kept[n], tensors[n]) for n in tensors)
    assert all(torch.equal(cast[n], tensors[n].float()) for n in tensors)


class _Code:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("old", [False, _long(True)])
def test_a_file_that_holds_code_is_refused_by_the_name_of_the_code(
    saved: tuple[Path, Path], tmp_path: Path, old: bool
) -> None:
    marker = tmp_path / "was-run"
    weights = {"base_model.model.a": torch.ones(2), "b": _Code(marker)}
    options = {"_use_new_zipfile_serialization": not old}
    folder = _with_weights(saved, tmp_path / "evil", weights, **options)
    problem = _problem(folder, tmp_path / "out")
    assert problem.startswith(f"{BIN} = posix.system: is code that reading the file would run")
    assert not marker.exists()


@pytest.mark.long
def test_a_plain_pickle_of_code_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    marker = tmp_path / "was-run"
    folder = _with_weights(saved, tmp_path / "evil", {})
    (folder / BIN).write_bytes(pickle.dumps(_Code(marker)))
    assert BIN in _problem(folder, tmp_path / "out")
    assert not marker.exists()


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({NAME: torch.ones(1).expand(1 << 40)}, "are claimed by a file of"),
        ({NAME: torch.ones(4, 32)}, "has no lora_B"),
        _long([1, 2], "must map names to tensors"),
        _long({}, "must map names to tensors"),
        _long({NAME: 1.0}, f"{BIN}:{NAME} = float: must be a tensor"),
        _long({3: torch.ones(2)}, "must be a tensor with a name"),
        _long({NAME: torch.ones(2, dtype=torch.int64)}, "must be a floating-point tensor"),
        _long({NAME: torch.ones(2, dtype=torch.float64)}, "add --dtype float32"),
        _long({NAME: torch.ones(2, 2).to_sparse()}, "must be a dense tensor"),
        _long({"q_proj.weight": torch.ones(2)}, "base_model.model."),
    ],
)
def test_what_is_no_adapter_is_refused_by_name(
    saved: tuple[Path, Path], tmp_path: Path, weights: object, problem: str
) -> None:
    folder = _with_weights(saved, tmp_path / "bad", weights)
    with pytest.raises(InvalidAdapter) as caught:
        from_pickle(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    said = [f"{v.field} = {v.value}: {v.description}" for v in caught.value.violations]
    assert any(problem in line for line in said), said


@pytest.mark.long
def test_values_that_are_no_numbers_are_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(saved[1] / TENSORS)
    tensors[NAME][1, 2] = torch.nan
    folder = _with_weights(saved, tmp_path / "bad", tensors)
    assert NAME in _problem(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "damage",
    [
        b"\x80\x02J\0",  # cut off in a number
        _long(b""),
        _long(b"PK\x03\x04" + b"\0" * 100),
        _long(b"\x80\x02](((."),
    ],
)
def test_a_damaged_file_is_refused(saved: tuple[Path, Path], tmp_path: Path, damage: bytes) -> None:
    folder = _with_weights(saved, tmp_path / "bad", {})
    (folder / BIN).write_bytes(damage)
    assert BIN in _problem(folder, tmp_path / "out")


def test_a_folder_without_a_pickle_has_nothing_to_convert(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="nothing to do"):
        from_pickle(saved[1], tmp_path / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS lacks some of the limits")
def test_the_process_that_reads_can_open_nothing_and_has_little_memory() -> None:
    program = """if True:
        import socket, subprocess
        from loraplex.rewriting.pickle_process import confine
        confine(memory_bytes=1 << 28)
        for attempt in (
            socket.socket,
            lambda: open("/etc/passwd"),
            lambda: subprocess.run(["true"]),
            lambda: bytearray(1 << 30),
        ):
            try:
                attempt()
            except (OSError, MemoryError) as error:
                print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    files, memory = done.stdout.splitlines()[:3], done.stdout.splitlines()[3:]
    assert len(files) == 3 and all("Too many open files" in line for line in files), done
    assert len(memory) == 1 and memory[0].startswith("MemoryError"), done
