"""The GPU benchmarks at least run: small shapes, on the CPU. Their numbers mean nothing here."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.common import SHAPES, floor_s
from benchmarks.llama import ALL_SEVEN, ATTENTION

ROOT = Path(__file__).parents[2]


MODULES = ["gpu_decode", "prefill", "cold_load", "gpu_lora_ops", "slora_tables"]


def options(out):
    return ["--device", "cpu", "--tiny", "--out", str(out)]


def results(out):
    (path,) = out.rglob("*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("module", [m for m in MODULES if m != "gpu_lora_ops"])
def test_a_dry_run_writes_its_results(module, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, *options(tmp_path)])
    importlib.import_module(f"benchmarks.gpu.{module}").main()
    assert results(tmp_path)["machine"]["device"] == "cpu"


@pytest.mark.parametrize("module", ["gpu_lora_ops", "sampling_moe"])
def test_a_dry_run_of_the_kernels_writes_its_results(module, tmp_path):
    """In a process of its own, with Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{module}", *options(tmp_path)],
        cwd=ROOT,
        env=dict(os.environ) | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert results(tmp_path)["machine"]["device"] == "cpu"


def test_a_machine_without_our_wheels_runs_them_with_stand_ins(tmp_path):
    """An image is written and read again; the engine's modules import."""
    standins = ROOT / "benchmarks" / "gpu" / "standins"
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import msgspec, runpy, sys\n"
            f"assert msgspec.__file__.startswith({str(standins)!r})\n"
            "import services.worker.engine\n"
            "runpy.run_module('benchmarks.gpu.cold_load', run_name='__main__')",
            *options(tmp_path),
        ],
        cwd=ROOT,
        env=dict(os.environ) | {"PYTHONPATH": f"{ROOT}:{standins}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert results(tmp_path)["load_ms"] > 0


def test_the_floor_counts_weights_cache_and_each_adapter_once():
    shape = SHAPES["llama-3-8b"]
    assert 2 * shape.num_adapter_weights(1, ALL_SEVEN) == 163_840 * 32
    assert 2 * shape.num_adapter_weights(1, ATTENTION) == 53_248 * 32
    assert shape.kv_bytes(1, 2) == 131_072
    base = floor_s(shape, 64, 1024, 0, 0, 2, 1e12)
    with_adapters = floor_s(shape, 64, 1024, 64, 2 * shape.num_adapter_weights(16), 2, 1e12)
    assert with_adapters - base == pytest.approx(64 * 16 * 163_840 * 32 / 1e12)
    assert base == pytest.approx((15.0e9 + 8.59e9) / 1e12, rel=0.01)


def test_the_script_of_all_parts_is_valid_shell():
    script = ROOT / "benchmarks" / "gpu" / "all.sh"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["sh", "-n", str(script)]).returncode == 0


BARE = """
import sys
from importlib.machinery import PathFinder
class Bare:
    def find_spec(name, *_):
        if name in ("grpc", "msgspec", "llguidance", "redis", "prometheus_client", "hypothesis"):
            paths = [path for path in sys.path if "site-packages" not in path]
            if (spec := PathFinder.find_spec(name, paths)) is None:
                raise ModuleNotFoundError(name)
            return spec
sys.meta_path.insert(0, Bare)
"""


@pytest.mark.long
def test_all_parts_run_without_a_gpu_and_without_what_a_bare_machine_lacks(tmp_path):
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    (tmp_path / "sitecustomize.py").write_text(BARE)
    script = ROOT / "benchmarks" / "gpu" / "all.sh"
    done = subprocess.run(
        [script, "--dry-run", tmp_path / "results"],
        env=dict(os.environ) | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = {path.stem for path in (tmp_path / "results").rglob("*.json")}
    assert {"overlap", "gpu_decode_tiny", "prefill_tiny"} < written
    assert {"gpu_lora_ops", "slora_tables", "cold_load"} < written


def test_all_parts_together_take_less_than_nine_minutes():
    script = (ROOT / "benchmarks" / "gpu" / "all.sh").read_text()
    lines = [line.lstrip() for line in script.splitlines()]
    limits = [int(line.split()[1]) for line in lines if line.startswith("part ")]
    assert sum(limits) <= 9 * 60
    assert all(any(f"benchmarks.gpu.{m}" in line for line in lines) for m in MODULES)
