"""The GPU benchmarks at least run: small shapes, on the CPU. Their numbers mean nothing here."""

import importlib
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import verdict
from benchmarks.gpu.bench_runner import DoesNotFit
from benchmarks.gpu.checks import WrongResult, compare
from benchmarks.gpu.common import SHAPES, floor_s
from benchmarks.gpu.profile_step import KernelEvent, labelled, timeline_ms
from benchmarks.gpu.results import Results
from benchmarks.llama import ALL_SEVEN, ATTENTION

ROOT = Path(__file__).parents[2]


PARTS = {
    "1": ["decode", "engine", "cold_load"],
    "2": ["prefill", "lora_ops", "profile_step"],
    "3": ["sampling_moe", "attention_ops", "row_bits", "quantised"],
}
"""What `all.sh` runs."""
MODULES = ["decode", "cold_load", "prefill", "profile_step", "slora_tables"]
LONG_MODULES = ["engine", "stack", "row_bits"]


def options(out):
    return ["--device", "cpu", "--tiny", "--out", str(out)]


def results(out):
    (path,) = out.rglob("*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "module",
    [*MODULES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_MODULES)],
)
def test_a_dry_run_writes_its_results(module, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, *options(tmp_path)])
    assert not importlib.import_module(f"benchmarks.gpu.{module}").main()
    assert results(tmp_path)["machine"]["device"] == "cpu"


@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=pytest.mark.long) for name in ("lora_ops", "sampling_moe")],
)
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


def test_results_of_tests_are_counted_by_file(tmp_path):
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="tests.a.test_b" name="good" />'
        '<testcase classname="tests.a.test_b" name="bad"><failure message="why&#10;where" />'
        '</testcase><testcase classname="tests.a.test_c" name="no"><error message="set-up" />'
        '</testcase><testcase classname="tests.a.test_c" name="lost">'
        '<failure message="CUDA error" />'
        '</testcase><testcase classname="tests.a.test_c" name="not"><skipped message="no wheel" />'
        "</testcase></testsuite></testsuites>"
    )
    found = verdict.summary(verdict.cases_of(file))
    assert [found[outcome] for outcome in verdict.OUTCOMES] == [1, 2, 1, 1]
    assert found["files"][0]["file"] == "tests/a/test_b.py"
    assert [found["files"][0][outcome] for outcome in verdict.OUTCOMES] == [1, 1, 0, 0]
    messages = [row["message"] for row in found["failures"]]
    assert messages == ["why", "set-up", "CUDA error"]
    assert found["reasons"] == {"no wheel": 1}


def test_a_test_that_ran_twice_counts_as_its_last_run_and_once_per_file(tmp_path):
    failed = '<testcase classname="tests.a" name="x"><failure message="{}" /></testcase>'
    first, second, third = (tmp_path / f"{i}.xml" for i in range(3))
    first.write_text('<testsuite><testcase classname="tests.a" name="x" /></testsuite>')
    both = failed.format("CUDA error") + failed.format("the process ended")
    second.write_text(f"<testsuite>{both}</testsuite>")
    third.write_text('<testsuite><testcase classname="tests.a" name="y" /></testsuite>')
    found = verdict.summary(verdict.cases_of(first, second, third))
    assert [found[outcome] for outcome in verdict.OUTCOMES] == [1, 0, 1, 0]


def test_the_floor_counts_weights_cache_and_each_adapter_once():
    shape = SHAPES["llama-3-8b"]
    assert 2 * shape.num_adapter_weights(1, ALL_SEVEN) == 163_840 * 32
    assert 2 * shape.num_adapter_weights(1, ATTENTION) == 53_248 * 32
    assert shape.kv_bytes(1, 2) == 131_072
    base = floor_s(shape, 64, 1024, 0, 0, 2, 1e12)
    with_adapters = floor_s(shape, 64, 1024, 64, 2 * shape.num_adapter_weights(16), 2, 1e12)
    assert with_adapters - base == pytest.approx(64 * 16 * 163_840 * 32 / 1e12)
    assert base == pytest.approx((13.96e9 + 8.59e9) / 1e12, rel=0.01)  # without the head


def test_the_script_of_all_parts_is_valid_shell():
    script = ROOT / "benchmarks" / "gpu" / "all.sh"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["sh", "-n", str(script)]).returncode == 0


BARE = """
import sys
from importlib.machinery import PathFinder
HIDDEN = "grpc grpc_health redis prometheus_client hypothesis".split()
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in HIDDEN:
            path = [path for path in sys.path if "site-packages" not in path]
        return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


def test_a_part_that_lacks_a_library_says_so_before_anything_runs(tmp_path):
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    hidden = BARE.replace("grpc grpc_health redis", "msgspec llguidance")
    (tmp_path / "sitecustomize.py").write_text(hidden)
    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu" / "all.sh", "1", tmp_path / "results"],
        env=dict(os.environ) | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 99 and "missing: msgspec llguidance." in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_without_a_gpu_and_without_what_a_bare_machine_lacks(part, tmp_path):
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    (tmp_path / "sitecustomize.py").write_text(BARE)
    script = ROOT / "benchmarks" / "gpu" / "all.sh"
    done = subprocess.run(
        [script, "--dry-run", part, tmp_path / "results"],
        env=dict(os.environ) | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = {path.stem for path in (tmp_path / "results").rglob("*.json")}
    names = {name.removesuffix("_tiny") for name in written}
    modules = {module.removesuffix("_step") for module in PARTS[part]}
    assert modules <= names


def test_each_part_ends_within_nine_minutes_and_runs_its_scripts():
    script = (ROOT / "benchmarks" / "gpu" / "all.sh").read_text()
    (limit_s,) = (int(line[7:]) for line in script.splitlines() if line.startswith("PART_S="))
    assert limit_s <= 9 * 60
    _, *parts, _ = re.split(r"^(?:1|2|3|parity)\)$", script, flags=re.MULTILINE)
    for text, modules in zip(parts, PARTS.values(), strict=True):
        pattern = r"^ +(?:gpu|operators) \d+ (\w+)"
        assert re.findall(pattern, text, flags=re.MULTILINE) == modules


def test_a_step_that_is_wrong_is_not_timed():
    expected = torch.ones(4, 4)
    compare(expected + 1e-3, expected, "two results")
    for wrong in (expected * 1.1, expected * torch.nan):
        with pytest.raises(WrongResult, match="two results"):
            compare(wrong, expected, "two results")


def test_a_setting_that_fails_does_not_end_the_others(tmp_path, capsys):
    results = Results("sample", Namespace(device="cpu", out=tmp_path), shape="tiny")
    for number in (1, 0, 2):
        with results.setting(f"1 / {number}"):
            results.add("rows", {"inverse": 1 / number})
    with results.setting("too large"):
        raise DoesNotFit
    assert "does not fit into memory: too large" in capsys.readouterr().out
    assert results.end() == 1
    written = json.loads((tmp_path / "cpu" / "sample.json").read_text())
    del written["machine"]
    assert written == {
        "shape": "tiny",
        "errors": ["1 / 0: ZeroDivisionError: division by zero"],
        "rows": [{"inverse": 1.0}, {"inverse": 0.5}],
    }


def test_columns_that_are_only_written_are_not_printed(tmp_path, capsys):
    args = Namespace(device="cpu", out=tmp_path)
    results = Results("sample", args, unprinted=("kernels",))
    results.add("cases", {"case": "decode", "kernels": [1, 2]})
    results.end()
    assert "kernels" not in capsys.readouterr().out
    assert json.loads((tmp_path / "cpu" / "sample.json").read_text())["cases"][0]["kernels"] == [
        1,
        2,
    ]


def test_kernels_of_others_that_are_not_there_are_named(tmp_path):
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    from benchmarks.gpu import peers

    with pytest.raises(peers.MissingKernels, match=r"lora_shrink_op\.py.*vllm/lora/ops"):
        peers.load("vllm", tmp_path, [], 1)
    folder = tmp_path / "vllm/lora/ops/triton_ops"
    folder.mkdir(parents=True)
    for file in peers.FILES["vllm"]:
        (folder / file).write_text("from vllm.elsewhere import _lora_shrink\n")
    with pytest.raises(peers.MissingKernels, match="shim"):
        peers.load("vllm", tmp_path, [], 1)


def test_kernels_of_others_get_answers_that_triton_takes_as_constants(tmp_path):
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    from benchmarks.gpu import peers

    shim = peers._Finder("vllm", tmp_path).create_module(ModuleSpec("vllm", None))
    assert shim.envs.VLLM_LORA_ENABLE_DUAL_STREAM is False
    assert shim.envs.VLLM_TUNED_CONFIG_FOLDER is None
    assert shim.current_platform.is_cuda() is torch.cuda.is_available()
    addresses = shim.async_tensor_h2d([1 << 63], dtype=torch.uint64, device="cpu")
    assert addresses.tolist() == [1 << 63]


def test_a_kernel_is_told_by_its_position_in_a_layer():
    events = [
        KernelEvent(name, float(i), i + 0.5, "1x1x1", 32)
        for i, name in enumerate(["gemm", "expand", "gemm", "expand", "norm", "gemm", "gemm"])
    ]
    labels = sorted(label for label, _ in labelled(events, num_layers=2))
    assert labels == ["expand", "expand", "gemm 1/2", "gemm 1/2", "gemm 2/2", "gemm 2/2", "norm"]
    assert timeline_ms([events]) == pytest.approx(
        {"span_ms": 6.5e-3, "busy_ms": 3.5e-3, "sum_ms": 3.5e-3}
    )
