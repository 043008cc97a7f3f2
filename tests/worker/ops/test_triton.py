"""Runs the kernel tests under Triton's interpreter, and compiles the kernels for GPUs.

Both in processes of their own: Triton reads TRITON_INTERPRET when it is first imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

FOLDER = Path(__file__).parent / "triton"
ROOT = FOLDER.parents[3]
COMPILE = """
import json, sys
from benchmarks.gpu.kernel_resources import resources, variants
CODES = (
    "attention.contexts-kv-int8", "attention.generations-kv-fp8",
    "rope.rotate_and_append-kv-int8", "rope.rotate_and_append-kv-fp8",
    "linear.fp8-64x128", "linear.int4-16x64-small",
)
FLOAT32 = ("attention.contexts", "recurrence.solve_chunks", "recurrence.advance_chunks")
ONLY_LONG = (  # another kernel compiles these options
    "attention.contexts-sinks", "attention.generations-windowed", "attention.generations-wide",
    "lora.long-expand-int8-qkv", "lora.long-expand-cut",
    "moe.grouped_linear-32-up", "moe.grouped_linear-64-up",
)
OTHER_GPUS = {
    80: ("attention.contexts-ampere", "attention.generations"),
    100: ("attention.contexts",),
}
def in_some(kernel, dtype, target):
    if target != 90:
        return dtype == "bf16" and kernel in OTHER_GPUS[target]
    if "-kv-" in kernel or kernel.startswith("linear."):
        return kernel in CODES
    if kernel.startswith("lora.") and kernel.endswith(("gate_up", "down")):
        return False
    if kernel.startswith("moe.") and kernel.endswith("down"):
        return kernel == "moe.grouped_linear-16-down" and dtype == "bf16"
    if dtype == "fp32" and kernel not in FLOAT32:
        return False
    if kernel in (*ONLY_LONG, "attention.contexts-ampere", "attention.contexts-small"):
        return False
    is_option = kernel.startswith("attention.") and "-" in kernel
    return not is_option or (dtype == "bf16" and kernel.count("-") == 1)
def in_all(kernel, dtype, target):
    if kernel.startswith("linear."):
        return target >= 90 or kernel.endswith("small")
    if "-kv-" in kernel:
        return dtype == "bf16"
    if target == 80 and kernel.startswith("attention.contexts-large"):
        return False  # such a GPU has too little shared memory to choose it
    if "int8" in kernel:
        return target <= 90
    if dtype == "fp32" and kernel == "attention.contexts-small-wide":
        return target == 80
    if dtype == "fp16":
        return False
    if target == 90:
        return True
    return dtype != "fp32" and not any(s in kernel for s in ("silu", "rope", "combine"))
rows = []
for variant in variants():
    for target in (80, 90, 100):
        kernel, dtype = variant.name.rsplit(".", 1)
        wanted = in_all(kernel, dtype, target)
        if wanted and (sys.argv[1] == "all" or in_some(kernel, dtype, target)):
            compiled = variant.compile(target)
            ptx, used = compiled.asm["ptx"], resources(compiled)
            rows.append({
                "name": variant.name, "target": target, "spills": used.spill_bytes,
                "registers": used.num_registers, "shared": used.shared_bytes,
                "tf32": "tf32" in ptx,
                "narrow": ptx.count("ld.global.b16") + ptx.count("ld.global.u16"),
                "wide": ptx.count("ld.global.v4") + ptx.count("cp.async.cg.shared.global"),
            })
json.dump(rows, sys.stdout)
"""


LARGE_PRODUCTS = tuple(
    f"linear.{kind}-{tile}."
    for kind in ("fp8", "int8", "int4")
    for tile in ("32x64", "64x64", "64x128", "128x64", "128x128", "256x128")
)


def run(arguments, interpret):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": "1"} if interpret else {}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("marks", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_kernels_are_right_under_the_interpreter(marks):
    options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout", "400", "-m", marks]
    done = run(["-m", "pytest", *options, str(FOLDER)], True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_steps_launch_kernels_that_compile_and_compile_none_after_the_start():
    done = run(["-m", "tests.worker.ops.triton.no_device"], False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.long)])
def compiled(request):
    """Compiling a kernel takes a second, so most are compiled for one generation of GPUs here."""
    done = run(["-c", COMPILE, request.param], False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(400)
def test_every_kernel_compiles_for_three_generations_of_gpus(compiled):
    assert {row["target"] for row in compiled} == {80, 90, 100}
    assert len([row for row in compiled if row["target"] == 90]) >= 22


def test_float32_kernels_use_no_tf32(compiled):
    """Half precision has it in the chunks of delta nets, whose operands are float32. Of the kernels
    that are compiled in float32 with the long tests only, `test_kernel_sources` reads the text."""
    chunks = ("recurrence.solve_chunks.", "recurrence.advance_chunks.")
    found = [row["name"] for row in compiled if row["tf32"]]
    assert [x for x in found if x.endswith("fp32") or not x.startswith(chunks)] == []


def test_no_kernel_spills_more_than_six_words_unless_its_registers_are_limited(compiled):
    """Those of long runs and of large steps are, and are tuned for sm_90."""
    limited = (
        "attention.contexts-large.bf16",
        "attention.contexts-large.fp16",
        "attention.generations.bf16",
        "attention.generations.fp16",
        "linear.fp8-256x128.bf16",
        "linear.int8-256x128.bf16",
    )

    def most(row):
        if row["name"].startswith("lora.long-"):
            return 48 if row["target"] == 90 else 192
        if row["name"] in limited:
            return 96 if row["target"] == 90 else 128
        return 24

    spilling = [(row["name"], row["target"]) for row in compiled if row["spills"] > most(row)]
    assert spilling == []


def test_shared_memory_suffices_for_two_programs_on_a_multiprocessor(compiled):
    """Not in float32 with the widest heads, which serve to compare models, nor where one program
    has as many warps as two of the others. Products in codes have tilings for small memories."""
    alone = ("attention.contexts", "attention.generations-wide.fp32", *LARGE_PRODUCTS)
    others = [row for row in compiled if not row["name"].startswith(alone)]
    assert [row["name"] for row in others if row["shared"] > 82 * 1024] == []


def test_shared_memory_of_every_kernel_fits_the_gpus_that_it_is_for(compiled):
    contexts, small = "attention.contexts", "attention.contexts-small"
    names = [row["name"] for row in compiled]
    tiles = {name for name in names if name.startswith(contexts) and not name.startswith(small)}
    large = [row for row in compiled if row["name"] in tiles]
    products = [row for row in compiled if row["name"].startswith(LARGE_PRODUCTS)]
    others = [row for row in compiled if row not in large and row not in products]
    assert [row["name"] for row in products if row["shared"] > 227 * 1024] == []
    assert [row["name"] for row in large if row["shared"] > 160 * 1024] == []
    assert [row["name"] for row in others if row["shared"] > 99 * 1024] == []


def test_four_programs_of_generations_fit_a_multiprocessor_of_a_data_centre_gpu(compiled):
    """Each has two warps, and two buffers of keys and values."""
    rows = [row for row in compiled if row["name"] == "attention.generations.bf16"]
    assert {row["target"] for row in rows} >= {80, 90}
    assert all(4 * 64 * row["registers"] <= 65536 for row in rows)
    assert all(4 * (row["shared"] + 1024) <= 227 * 1024 for row in rows if row["target"] >= 90)


def test_half_precision_adapters_are_read_sixteen_bytes_at_a_time(compiled):
    lora = [
        row
        for row in compiled
        if row["name"].startswith(("lora.shrink", "lora.expand", "lora.fused", "lora.long-"))
    ]
    half = [row for row in lora if not row["name"].endswith(("fp32", "-cut.bf16"))]
    assert len(half) >= 9
    assert [row["name"] for row in half if row["narrow"] or not row["wide"]] == []
