"""Compile every Triton kernel for a GPU that is not here: types, registers, spills, shared memory.

Must run in a process without TRITON_INTERPRET. A kernel's row says what a launch on a real model
looks like: pointers 16-byte aligned, strides divisible by 16, and the constants of its plan.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.worker.kernels.attention import triton as attention_launch
from services.worker.kernels.attention import triton_kernels as attention
from services.worker.kernels.lora import plan as lora_plan
from services.worker.kernels.lora import triton as lora_launch
from services.worker.kernels.lora import triton_kernels as lora
from services.worker.kernels.lora import triton_work
from services.worker.kernels.moe import triton as moe
from services.worker.kernels.norm import triton as norm
from services.worker.kernels.rope import triton as rope
from services.worker.kernels.sampling import triton as sampling
from services.worker.kernels.sampling import truncation
from services.worker.kernels.silu import triton as silu

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
CAPABILITIES = (80, 90, 100)
WARP_THREADS = 32
WIDEST_INPUTS = 14336
"""Llama-3-8B's down projection: the most partial sums."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with one set of types and constants."""

    name: str
    function: Any
    types: Mapping[str, str]
    """Triton's type of each run-time argument by name."""
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: Sequence[str] = field(default=())
    """Integer arguments that are multiples of 16."""

    def compile(self, capability: int) -> Any:
        """Triton's compiled kernel for sm_`capability`; `asm["ptx"]`, `asm["cubin"]`."""
        names = list(self.function.arg_names)
        signature = {name: self.types.get(name, "constexpr") for name in names}
        attrs = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name in self.divisible or signature[name].startswith("*")
        }
        source = ASTSource(self.function, signature, dict(self.constants), attrs)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return triton.compile(
            source, target=GPUTarget("cuda", capability, WARP_THREADS), options=options
        )


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program takes."""

    num_registers: int
    """Of each thread."""
    spill_bytes: int
    """Stack of each thread."""
    shared_bytes: int


def resources(compiled: Any) -> Resources:
    """Read them from the machine code."""
    from triton.knobs import nvidia

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            [nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return Resources(usage["REG"], usage["STACK"], compiled.metadata.shared)


def variants() -> Iterator[Variant]:
    """Every kernel in every dtype and family that the worker launches."""
    yield _count_work()
    yield from _draw()
    yield _truncate()
    for dtype, name in DTYPES.items():
        yield from _lora(dtype, name)
        yield from _attention(dtype, name)
        yield from _fused(name)
        yield from _moe(dtype, name)


def _count_work() -> Variant:
    names = list(triton_work.count_work.arg_names)
    types = dict.fromkeys(names[:-1], "i32")
    types |= dict.fromkeys(("runs", "index", "in_features", "ends"), "*i32")
    types["records"] = "*i64"
    return Variant("lora.count_work", triton_work.count_work, types, {"MAX_RUNS": 256})


def _lora(dtype: torch.dtype, name: str) -> Iterator[Variant]:
    half, single = lora_plan.PLANS_HALF, lora_plan.PLANS_FLOAT32
    tables = {"planes": "*fp32", "arena": "*u8", "runs": "*i32", "index": "*i32"}
    tables |= {"records": "*i64", "ends": "*i32"}
    strides = ("x_stride", "y_stride", "plane_stride", "rank_stride", "num_inputs")
    types = dict.fromkeys(("site", "num_sites", *strides), "i32") | tables
    types |= {"x": f"*{name}", "y": f"*{name}"}
    for family, plan in (single if dtype is torch.float32 else half).items():
        of_int8 = (False, True) if dtype is torch.bfloat16 else (False,)
        for int8, kernel in itertools.product(of_int8, (lora.shrink, lora.expand)):
            if kernel is lora.shrink:
                constants = lora_launch.shrink_constants(plan, 256, dtype, 16, int8)
            else:
                inputs = WIDEST_INPUTS
                constants = lora_launch.expand_constants(plan, 256, inputs, dtype, 16, int8)
            yield Variant(
                f"lora.{kernel.__name__}{'-int8' * int8}.{family}.{name}",
                kernel,
                {key: value for key, value in types.items() if key in kernel.arg_names},
                constants,
                plan.num_warps,
                plan.num_stages,
                strides,
            )


HEADS = attention_launch.HeadShape(32, 8, 128, 128**-0.5, None, None)
"""Llama-3-8B."""


def _attention(dtype: torch.dtype, name: str) -> Iterator[Variant]:
    shape, tensor = HEADS, f"*{name}"
    head = {"HEAD_DIM": shape.head_dim, "BLOCK_DIM": shape.block_dim}
    tilings = {
        "decode": attention_launch.decode_tiling(shape, 8, dtype.itemsize),
        "context": attention_launch.context_tiling(shape, dtype.itemsize),
    }
    types = dict.fromkeys(("q", "k_plane", "v_plane", "out"), tensor)
    types |= dict.fromkeys(("partial", "partial_stats"), "*fp32")
    types |= dict.fromkeys(("tiles", "tables"), "*i32")
    strides = ("plane_stride", "q_stride", "out_stride")
    types |= dict.fromkeys((*strides, "table_stride", "first_row", "num_heads", "window"), "i32")
    types |= {"scale": "fp32", "softcap": "fp32"}
    for phase, tiling in tilings.items():
        constants = head | {
            "NUM_SHARED": shape.num_shared,
            "BLOCK_SHARED": shape.block_shared,
            "BLOCK_ROWS": tiling.block_rows,
            "BLOCK_KEYS": tiling.block_keys,
            "TOKENS": 16,
            "NUM_SPLITS": tiling.num_splits,
            "HAS_SOFTCAP": phase == "context",
            "HAS_WINDOW": phase == "context",
            "WIDEN": False,
        }
        yield Variant(
            f"attention.{phase}.{name}",
            attention.attend,
            types,
            constants,
            tiling.num_warps,
            tiling.num_stages,
            strides,
        )
    yield Variant(
        f"attention.combine.{name}",
        attention.combine,
        {key: types[key] for key in attention.combine.arg_names if key in types},
        head | {"NUM_SPLITS": 8},
        num_warps=1,
        divisible=("out_stride",),
    )
    yield Variant(
        f"attention.append.{name}",
        attention.append,
        dict.fromkeys(("k", "v", "k_plane", "v_plane"), tensor)
        | {"places": "*i64", "k_stride": "i32", "v_stride": "i32", "plane_stride": "i32"},
        head | {"TOKENS": 16},
        num_warps=1,
        divisible=("k_stride", "v_stride", "plane_stride"),
    )


def _draw() -> Iterator[Variant]:
    types = dict.fromkeys(("best_scores", "scores", "floors"), "*fp32")
    types |= {"best_tokens": "*i32", "num_tokens": "i32", "num_blocks": "i32"}
    types |= dict.fromkeys(("keys", "inverses", "logs"), "*i64")
    constants = {"BLOCK_TOKENS": sampling.BLOCK_TOKENS}
    yield Variant(
        "sampling.draw", sampling.draw_kernel, types, constants, divisible=("num_tokens",)
    )
    names = ("floors", "best_scores", "keys", "inverses", "logs")
    of_rows = {name: types[name] for name in names} | {"best_tokens": "*i64", "num_rows": "i32"}
    constants = {"BLOCK_ROWS": sampling.BLOCK_ROWS}
    yield Variant("sampling.floor", sampling.floor_kernel, of_rows, constants)


NUM_EXPERTS, NUM_ACTIVE = 128, 8
"""Qwen3-30B-A3B."""


def _moe(dtype: torch.dtype, name: str) -> Iterator[Variant]:
    tensor, widths = f"*{name}", ("num_outputs", "num_inputs")
    types = dict.fromkeys(("y", "x", "weights"), tensor) | {"order": "*i64", "ends": "*i32"}
    types |= dict.fromkeys(("num_experts", *widths), "i32")
    for tiling in moe.tilings(dtype):
        for of_tokens in (True, False):
            yield Variant(
                f"moe.grouped_linear-{tiling.block_rows}-{'up' if of_tokens else 'down'}.{name}",
                moe.grouped_linear_kernel,
                types,
                moe.constants_of(tiling, NUM_EXPERTS, NUM_ACTIVE if of_tokens else 0, dtype),
                tiling.num_warps,
                tiling.num_stages,
                widths,
            )
    yield Variant(
        f"moe.combine.{name}",
        moe.combine_kernel,
        {"out": tensor, "y": tensor, "weights": "*fp32"},
        {"WIDTH": 2048, "NUM_ACTIVE": NUM_ACTIVE, "BLOCK_COLUMNS": moe.BLOCK_COLUMNS},
    )


def _truncate() -> Variant:
    types = dict.fromkeys(("scores", "limits", "bests", "candidates"), "*fp32")
    types |= {"powers": "*i32", "num_tokens": "i32"}
    constants = {
        "BLOCK": truncation.BLOCK_TOKENS,
        "ROOM": truncation.BLOCK_TOKENS,
        "NUM_BINS": truncation.NUM_BINS,
    }
    return Variant(
        "sampling.truncate",
        truncation.truncate_kernel,
        types,
        constants,
        truncation.NUM_WARPS,
        divisible=("num_tokens",),
    )


def _fused(name: str) -> Iterator[Variant]:
    tensor = f"*{name}"
    yield Variant(
        f"norm.add_rms_norm.{name}",
        norm.add_rms_norm_kernel,
        dict.fromkeys(("out", "residual", "update", "weight"), tensor)
        | {"row_stride": "i32", "eps": "fp32"},
        {"WIDTH": 4096, "BLOCK_WIDTH": 4096, "HAS_UPDATE": True, "IN_FLOAT32": False},
        num_warps=8,
        divisible=("row_stride",),
    )
    yield Variant(
        f"silu.silu_and_multiply.{name}",
        silu.silu_and_multiply_kernel,
        {"out": tensor, "gate_up": tensor},
        {"WIDTH": 14336, "BLOCK_COLUMNS": silu.BLOCK_COLUMNS},
    )
    strides = ("q_stride", "k_stride", "v_stride", "plane_stride")
    yield Variant(
        f"rope.rotate_and_append.{name}",
        rope.rotate_and_append_kernel,
        dict.fromkeys(("q", "k", "v", "cos", "sin", "k_plane", "v_plane"), tensor)
        | {"places": "*i64"}
        | dict.fromkeys(strides, "i32"),
        {
            "NUM_HEADS": 32,
            "TOKENS": 16,
            "HEAD_DIM": 128,
            "BLOCK_DIM": 128,
            "HALF": 64,
            "BLOCK_HALF": 64,
        },
        num_warps=1,
        divisible=strides,
    )
