"""The arena's size follows from what is free once the base is loaded, not from its files."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.errors import InvalidRequest
from loraplex_services.worker.runner import allocation, memory
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.memory import (
    ArenaSize,
    MemoryState,
    default_host_cache_bytes,
    memory_of,
)
from tests.worker.tiny import write_base

MiB = 1 << 20
CAPACITY = 64 * MiB
STATE = MemoryState(free_bytes=60 * MiB, total_bytes=100 * MiB)


def no_step() -> int:
    raise AssertionError("nothing is to be measured")


def test_gpus_share_a_quarter_of_the_memory_for_images_of_adapters() -> None:
    assert default_host_cache_bytes(STATE, num_gpus=5) == 5 * MiB
    assert default_host_cache_bytes(STATE, num_gpus=1) == 25 * MiB


def test_bytes_are_taken_as_they_are() -> None:
    assert ArenaSize(num_bytes=7).choose(STATE, no_step, is_gpu=True) == 7


def test_a_percentage_is_of_what_the_largest_step_leaves() -> None:
    size = ArenaSize(share=0.5)
    assert size.choose(STATE, lambda: 10 * MiB, is_gpu=True) == 25 * MiB
    assert size.choose(STATE, lambda: 0, is_gpu=False) == 30 * MiB


def test_a_gpu_is_used_up_to_the_share_of_its_memory_with_everything_on_it() -> None:
    """40 MiB are in use, and the largest step needs 10: of 90 or 75 in all, 40 or 25 are left."""
    assert ArenaSize().choose(STATE, lambda: 10 * MiB, is_gpu=True) == 40 * MiB
    size = ArenaSize(gpu_utilization=0.75)
    assert size.choose(STATE, lambda: 10 * MiB, is_gpu=True) == 25 * MiB


def test_a_cpu_gets_an_eighth_of_the_host_and_at_most_one_gibibyte() -> None:
    assert ArenaSize().choose(STATE, no_step, is_gpu=False) == 100 * MiB // 8
    large = MemoryState(1 << 40, 1 << 40)
    assert ArenaSize().choose(large, no_step, is_gpu=False) == 1 << 30


def test_a_share_of_a_gpu_means_nothing_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    size = ArenaSize(num_bytes=MiB, gpu_utilization=0.9)
    assert size.choose(STATE, no_step, is_gpu=False) == MiB
    assert "gpu_memory_utilization has no effect on a CPU" in caplog.text


def test_a_setting_that_leaves_nothing_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="gpu_memory_utilization: leaves nothing"):
        ArenaSize(gpu_utilization=0.4).choose(STATE, lambda: 0, is_gpu=True)
    with pytest.raises(InvalidRequest, match="kv_memory: leaves nothing"):
        ArenaSize(share=0.5).choose(STATE, lambda: 60 * MiB, is_gpu=True)


def test_more_bytes_than_the_machine_has_are_refused_before_they_are_touched() -> None:
    assert ArenaSize(num_bytes=100 * MiB).choose(STATE, no_step, is_gpu=False) == 100 * MiB
    with pytest.raises(InvalidRequest, match="kv_memory: is more than the 104857600 bytes"):
        ArenaSize(num_bytes=100 * MiB + 1).choose(STATE, no_step, is_gpu=False)


def test_the_hosts_memory_is_within_its_bounds() -> None:
    found = memory_of(torch.device("cpu"))
    assert 0 < found.free_bytes <= found.total_bytes


def test_the_limit_of_a_control_group_bounds_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{300 * MiB}\n")
    (tmp_path / "memory.current").write_text(f"{100 * MiB}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory_of(torch.device("cpu")) == MemoryState(200 * MiB, 300 * MiB)
    (tmp_path / "memory.stat").write_text(f"anon {60 * MiB}\ninactive_file {40 * MiB}\n")
    assert memory_of(torch.device("cpu")) == MemoryState(240 * MiB, 300 * MiB), "files read once"


def _held_bytes() -> int:
    """Of all tensors that are alive: what would be used of a device that holds nothing else."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 64 MiB on which exactly the tensors are that were made since."""
    before = _held_bytes()

    def faked(_: torch.device) -> MemoryState:
        return MemoryState(CAPACITY - (_held_bytes() - before), CAPACITY)

    monkeypatch.setattr(allocation, "memory_of", faked)


def _half(base: Path, out: Path) -> Path:
    """The same base in bfloat16."""
    shutil.copytree(base, out)
    path = out / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    return out


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("case", ["same", "half", "dummy", "copied"])
def test_what_is_left_counts_and_not_what_the_files_hold(tmp_path: Path, case: str) -> None:
    """float32 of a bfloat16 checkpoint, random weights, a second copy in the folder: the arena is
    as large for all of them, since the model is."""
    base = write_base(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    folder = _half(base, tmp_path / "half") if case == "half" else base
    if case == "copied":
        shutil.copyfile(base / "model.safetensors", base / "consolidated.safetensors")
    runner = build_runner(
        folder, device="cpu", dtype="float32", cpu_isa="torch", arena_bytes=0, arena_share=0.5,
        load_format="dummy" if case == "dummy" else "auto",
    )  # fmt: skip
    weight_bytes = runner._model.weight_bytes
    assert weight_bytes > 4 * config["hidden_size"] * config["vocab_size"]
    arena_bytes = runner.arena_blocks * runner.block_bytes
    expected = (CAPACITY - weight_bytes) // 2
    assert expected * 0.97 - runner.block_bytes <= arena_bytes <= expected
