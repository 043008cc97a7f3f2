"""Compiled products and elementwise operators against torch; dispatch and building."""

import ctypes
import importlib.util
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from loraplex.errors import InvalidRequest
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.native import bindings, build
from loraplex_services.worker.native.check import computes_right
from loraplex_services.worker.native.elementwise import Operation
from loraplex_services.worker.native.isa import (
    AMX,
    ISA_FLAGS,
    LEVELS,
    choose_isa,
    host_isas,
    level_table,
)
from loraplex_services.worker.ops.activation.reference import silu_and_multiply
from loraplex_services.worker.ops.linear.reference import linear
from loraplex_services.worker.ops.norm.reference import rms_norm
from loraplex_services.worker.ops.rope.reference import rotate
from tests.worker.native.isas import ISAS, native

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def test_the_documentation_shows_what_runs_where():
    assert level_table() in Path("docs/performance/cpu.md").read_text()


@pytest.fixture(params=ISAS)
def compiled(request):
    return native(request.param)


def test_a_level_has_the_products_that_its_table_says(compiled):
    level = LEVELS[compiled.isa]
    assert compiled.has_tiles == level.has_dot_products
    assert compiled.has_fixed == (level.products == "16-bit integers")


def close(actual, expected, num_rows=None):
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.float(),
        expected.float(),
        rtol=tolerance,
        atol=tolerance,
        msg=num_rows and (lambda text: f"{num_rows} rows: {text}"),
    )


def rows_beside_nan(num_rows, num_inputs, dtype):
    """Rows of a matrix whose other columns are NaN."""
    x = torch.full((num_rows, num_inputs + 3), float("nan"), dtype=dtype)[:, :num_inputs]
    x.copy_(torch.randn(num_rows, num_inputs))
    return x


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 100), (200, 64), (70, 1000)], ids=str)
def test_a_packed_product_equals_torch(compiled, shape, dtype, stored):
    torch.manual_seed(0)
    weight = (torch.randn(shape) / shape[1] ** 0.5).to(stored)
    packed = compiled.pack(weight)
    for num_rows in (1, 2, 3, 5, 6, 7, 13, 32, 200):
        x = rows_beside_nan(num_rows, shape[1], dtype)
        close(compiled.linear(x, packed, shape[0]), linear(x, weight).to(dtype), num_rows)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_inputs", [90, 700])
def test_a_row_of_a_product_does_not_depend_on_its_neighbours(compiled, num_inputs, stored):
    torch.manual_seed(1)
    packed = compiled.pack(torch.randn(300, num_inputs).to(stored))
    x = torch.randn(77, num_inputs)
    together = compiled.linear(x, packed, 300)
    for row in range(77):
        assert compiled.linear(x[row : row + 1], packed, 300).equal(together[row : row + 1])
    for count in (2, 3, 6, 7, 8, 9, 13, 32):
        assert compiled.linear(x[:count], packed, 300).equal(together[:count])


def test_callers_on_several_threads_wait_for_each_other(compiled):
    torch.manual_seed(2)
    packed = compiled.pack(torch.randn(300, 90))
    inputs = [torch.randn(64, 90) for _ in range(4)]
    expected = [compiled.linear(x, packed, 300) for x in inputs]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(50):
            answers = list(callers.map(lambda x: compiled.linear(x, packed, 300), inputs))
            assert all(answer.equal(y) for answer, y in zip(answers, expected, strict=True))


@pytest.fixture
def tiled(compiled):
    if not compiled.has_tiles:
        pytest.skip(f"{compiled.isa} has no tiles")
    return compiled


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 7), (33, 100), (200, 64), (960, 576), (70, 4200)], ids=str
)
def test_a_product_on_tiles_equals_torch(tiled, shape, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(shape) / shape[1] ** 0.5).bfloat16()
    packed = tiled.pack_tiles(weight)
    for num_rows in (1, 2, 15, 16, 17, 31, 32, 33, 600):
        x = rows_beside_nan(num_rows, shape[1], torch.bfloat16)
        y = tiled.linear_tiles(x, packed, shape[0], dtype)
        close(y, linear(x, weight).to(dtype), num_rows)
        for row in range(0, num_rows, 7):
            alone = tiled.linear_tiles(x[row : row + 1], packed, shape[0], dtype)
            assert alone.equal(y[row, None]), (num_rows, row)


def test_the_faster_of_two_products_is_used_and_named(tiled, monkeypatch):
    torch.manual_seed(5)
    weight, x = torch.randn(70, 96).bfloat16(), torch.randn(3, 96).bfloat16()
    for prefers_tiles, name in (
        (True, f"native-{tiled.isa}"),
        (False, f"native-{tiled.isa}" + "-widened" * (tiled.isa != AMX)),
    ):
        monkeypatch.setattr(tiled, "prefers_tiles", prefers_tiles)
        monkeypatch.setattr(tiled, "uses_pairs", prefers_tiles)
        operators = NativeOperators(tiled, torch.bfloat16)
        assert operators.name == name
        assert NativeOperators(tiled, torch.float32).name == f"native-{tiled.isa}"
        product = operators.linear(weight)
        close(product.apply(x), linear(x, weight).bfloat16())
        assert product.weight_rows(5, 66).equal(weight[5:66].float())


@pytest.mark.parametrize("shape", [(1, 1), (70, 37), (64, 96)], ids=str)
def test_rows_of_a_weight_in_tiles_come_back(tiled, shape):
    weight = torch.randn(shape).bfloat16()
    packed, middle = tiled.pack_tiles(weight), shape[0] // 2
    rows = [(0, shape[0]), (middle, shape[0]), (0, middle + 1)]
    for begin, end in rows:
        assert tiled.unpack_tile_rows(packed, shape[1], begin, end).equal(weight[begin:end])


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("width", [1, 24, 64, 100, 512])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norm_adds_the_update_first(compiled, dtype, width, in_float32):
    torch.manual_seed(2)
    x, update = torch.randn(21, width).to(dtype), torch.randn(21, width).to(dtype)
    weight = torch.rand(width) + 0.5
    summed = x + update
    expected = rms_norm(summed, weight, 1e-5).to(dtype)
    close(compiled.norm(x, update, weight, 1e-5, in_float32), expected)
    assert x.equal(summed)
    close(compiled.norm(x, None, weight, 1e-5, in_float32), expected)
    assert x.equal(summed)


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (24, 12), (10, 5), (32, 8)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotation_in_place_equals_the_reference(compiled, dtype, head_dim, half):
    torch.manual_seed(3)
    qkv = torch.randn(20, 5 * head_dim).to(dtype)
    angles = torch.rand(20, 1, half) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected, rest = qkv[:, : 3 * head_dim].clone(), qkv[:, 3 * head_dim :].clone()
    expected = rotate(expected.view(20, 3, head_dim), cos.squeeze(1), sin.squeeze(1))
    compiled.rotate(qkv[:, : 3 * head_dim], cos, sin, head_dim)
    close(qkv[:, : 3 * head_dim], expected.flatten(1).to(dtype))
    assert qkv[:, 3 * head_dim :].equal(rest)


@pytest.mark.parametrize("width", [1, 24, 100])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gated_silu_equals_the_reference_over_the_whole_range(compiled, dtype, width):
    torch.manual_seed(4)
    x = (torch.randn(19, 2 * width) * 30).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = 1000.0, -1000.0, 0.0
    close(compiled.elementwise(Operation.SILU, *x.chunk(2, 1)), silu_and_multiply(x).to(dtype))


@pytest.mark.parametrize(
    ("operation", "activate"),
    [
        (Operation.SIGMOID, torch.sigmoid),
        (Operation.GELU_TANH, partial(F.gelu, approximate="tanh")),
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_an_activation_times_a_matrix_equals_torch(compiled, dtype, operation, activate):
    torch.manual_seed(4)
    x = (torch.randn(19, 100) * 9).to(dtype)
    for gates in (x[:, 3:53], x[:, :1]):
        found = compiled.elementwise(operation, gates, x[:, 50:])
        close(found, (activate(gates.double()).to(dtype) * x[:, 50:]).to(dtype))
    x[2, 3:53] = torch.nan
    assert compiled.elementwise(operation, x[:, 3:53], x[:, 50:])[2].isnan().all()


def test_torch_is_the_path_that_can_always_be_forced():
    assert choose_isa("torch") == "torch"
    assert bindings.load_native("torch") is None


def test_an_instruction_set_that_is_missing_is_refused_with_those_that_are_not():
    for isa in {*ISA_FLAGS} - {*host_isas()}:
        with pytest.raises(InvalidRequest, match=r"cpu_isa.*auto"):
            choose_isa(isa)


def test_without_a_compiler_torch_computes_and_the_log_says_so(monkeypatch, tmp_path, caplog):
    if choose_isa("auto") == "torch":
        pytest.skip("nothing to build on this processor")
    monkeypatch.setattr(build, "library_dirs", lambda: [tmp_path])
    monkeypatch.setattr(bindings, "_loaded", {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bindings.load_native("auto") is None
    [line] = caplog.messages
    assert "cpu kernels: torch" in line and "pip install 'loraplex[compiler]'" in line


def test_without_sources_torch_computes_and_the_log_says_so(monkeypatch, tmp_path, caplog):
    if choose_isa("auto") == "torch":
        pytest.skip("nothing to build on this processor")
    monkeypatch.setattr(build, "library_dirs", lambda: [tmp_path])
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path / "gone")
    monkeypatch.setattr(bindings, "_loaded", {})
    monkeypatch.setattr(build, "source_hash", lambda: "of nothing")
    assert bindings.load_native("auto") is None
    [line] = caplog.messages
    assert "cpu kernels: torch" in line and "sources are missing" in line


def pretend_zig(folder):
    """A package `ziglang` that hands what it is given to this system's compiler."""
    compiler = build.find_compiler()
    if compiler is None or "ziglang" in compiler:
        pytest.skip("the system has no C++ compiler")
    (folder / "ziglang").mkdir(parents=True)
    (folder / "ziglang/__init__.py").touch()
    (folder / "ziglang/__main__.py").write_text(
        "import os, sys\n"
        "assert sys.argv[1:3] == ['c++', '-mcpu=baseline'], sys.argv\n"
        f"os.execv({compiler[0]!r}, [{compiler[0]!r}, *sys.argv[3:]])\n"
    )


def test_the_compiler_of_a_wheel_serves_where_the_system_has_none(monkeypatch, tmp_path):
    pretend_zig(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "COMPILERS", ())
    source = tmp_path / "sources" / "answer.cpp"
    source.parent.mkdir()
    source.write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    )
    monkeypatch.setattr(build, "SOURCE_DIR", source.parent)
    monkeypatch.setattr(build, "library_dirs", lambda: [tmp_path / "libraries"])
    lines = []
    monkeypatch.setitem(ISA_FLAGS, "any", ())
    path = build.build_library("any", lines.append)
    assert ctypes.CDLL(str(path)).answer() == 42
    assert "any: compiled answer.cpp, 1 of 1" in lines


def test_a_library_that_computes_right_is_told_from_one_that_does_not(compiled, monkeypatch):
    assert computes_right(compiled)
    product = compiled.linear
    for num_wrong in (39, 13):  # rows of the products that are wrong
        with monkeypatch.context() as patch:
            patch.setattr(
                compiled,
                "linear",
                lambda x, packed, n, wrong=num_wrong: product(x, packed, n).roll(
                    int(len(x) == wrong), -1
                ),
            )
            assert not computes_right(compiled)
    coded = compiled.linear_codes
    for num_wrong in (13, 5, 1):
        with monkeypatch.context() as patch:
            patch.setattr(
                compiled,
                "linear_codes",
                lambda x, weight, wrong=num_wrong: coded(x, weight).roll(int(len(x) == wrong), -1),
            )
            assert not computes_right(compiled)
    drawn = compiled.draw
    monkeypatch.setattr(compiled, "draw", lambda scores, keys: drawn(scores, keys).roll(1))
    assert not computes_right(compiled)


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch, tmp_path):
    if choose_isa("auto") == "torch":
        pytest.skip("nothing to build on this processor")
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    broken.chmod(0o755)
    folder = tmp_path / "libraries"
    monkeypatch.setattr(build, "library_dirs", lambda: [folder])
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildFailed, match="no such luck"):
        build.build_library(choose_isa("auto"))
    assert list(folder.iterdir()) == []


def test_who_builds_at_the_same_time_gets_the_one_library_that_is_made(monkeypatch, tmp_path):
    if choose_isa("auto") == "torch":
        pytest.skip("nothing to build on this processor")
    compiler, calls, folder = (tmp_path / name for name in ("c++", "calls", "libraries"))
    compiler.write_text(
        f'#!/bin/sh\necho "$*" >>"{calls}"\n'
        'while [ $# -gt 0 ]; do [ "$1" != -o ] || : >"$2"; shift; done\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "library_dirs", lambda: [folder])
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build.build_library, [choose_isa("auto")] * 4))
    assert paths == set(folder.iterdir())
    assert len([line for line in calls.read_text().splitlines() if "-shared" in line]) == 1


@pytest.mark.long
def test_the_compiler_of_the_real_wheel_makes_kernels_that_compute_right(monkeypatch, tmp_path):
    pytest.importorskip("ziglang")
    if choose_isa("auto") == "torch":
        pytest.skip("nothing to build on this processor")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build, "library_dirs", lambda: [tmp_path])
    isa = choose_isa("auto")
    assert computes_right(bindings.Native(isa, build.build_library(isa)))


@pytest.mark.long
def test_the_compiler_of_the_real_wheel_makes_kernels_for_aarch64(monkeypatch, tmp_path):
    pytest.importorskip("ziglang")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build, "ZIG", (*build.ZIG, "-target", "aarch64-linux-gnu"))
    monkeypatch.setattr(build, "library_dirs", lambda: [tmp_path])
    header = build.build_library("neon_bf16").read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18] == 183  # aarch64


CROSS_COMPILERS = ("x86_64-linux-gnu-g++", "aarch64-linux-gnu-g++")


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["g++", "clang++", *CROSS_COMPILERS])
@pytest.mark.parametrize("isa", ISA_FLAGS)
def test_compilers_have_nothing_to_warn_of(compiler, isa):
    machine = compiler.split("-")[0] if compiler in CROSS_COMPILERS else platform.machine()
    if shutil.which(compiler) is None or machine not in LEVELS[isa].machines:
        pytest.skip(f"{compiler} for {isa} is not here")
    sources = [str(path) for path in build.SOURCE_DIR.glob("*.cpp")]
    strict = ("-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    subprocess.run([compiler, *strict, *ISA_FLAGS[isa], *sources], check=True)
