"""Registers, spills and shared memory of every Triton kernel, compiled here; needs no GPU.

python -m benchmarks run gpu.kernel_resources [--target 90] [--only lora]

Must run in a process without TRITON_INTERPRET. Each kernel is compiled as for a launch on a real
model: pointers 16-byte aligned, strides divisible by 16, and the constants of its plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from benchmarks.gpu.kernel_variant import Variant, resources
from benchmarks.gpu.lora_variants import lora_variants
from loraplex_services.worker.cache.state_layout import plan_state
from loraplex_services.worker.ops.activation import triton as silu
from loraplex_services.worker.ops.attention import item_kernel, work_items
from loraplex_services.worker.ops.attention import shapes as attention_shapes
from loraplex_services.worker.ops.attention import triton as attention_launch
from loraplex_services.worker.ops.attention import triton_kernels as attention
from loraplex_services.worker.ops.linear import triton as linear_launch
from loraplex_services.worker.ops.linear import triton_kernels as linear
from loraplex_services.worker.ops.linear.units import LANES, PAIRS
from loraplex_services.worker.ops.moe import triton as moe
from loraplex_services.worker.ops.norm import triton as norm
from loraplex_services.worker.ops.recurrence import triton as delta_launch
from loraplex_services.worker.ops.recurrence import triton_kernels as delta
from loraplex_services.worker.ops.rope import triton as rope
from loraplex_services.worker.ops.sampling import triton as sampling
from loraplex_services.worker.ops.sampling import truncation
from loraplex_services.worker.types.model_config import RecurrenceConfig

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
CAPABILITIES = (80, 90, 100)


def variants() -> Iterator[Variant]:
    """Every kernel in every dtype and family that the worker launches."""
    yield from lora_variants(DTYPES)
    yield _list_items()
    yield from _draw()
    yield _truncate()
    for dtype, name in DTYPES.items():
        yield from _attention(dtype, name)
        yield from _fused(name)
        yield from _moe(dtype, name)
        yield from _recurrence(dtype, name)
    yield from _codes()


HEADS = attention_shapes.HeadShape(32, 8, 128, 128**-0.5, None, None)
"""Llama-3-8B."""
WINDOWED_HEADS = attention_shapes.HeadShape(16, 8, 256, 256**-0.5, 50.0, 4096)
"""Gemma-2-9B's layers with a window."""
SINK_HEADS = attention_shapes.HeadShape(64, 8, 64, 64**-0.5, None, 128)
"""gpt-oss's layers with a window; all of its layers have sinks."""
WIDE_HEADS = attention_shapes.HeadShape(32, 4, 512, 1.0, None, None)
"""Heads as wide as those of the layers of Gemma 4 that see all keys."""


def _attention(dtype: torch.dtype, name: str) -> Iterator[Variant]:
    tensor = f"*{name}"
    types = dict.fromkeys(("q", "k_plane", "v_plane", "out"), tensor)
    types |= dict.fromkeys(("partial", "partial_stats", "sinks"), "*fp32")
    types |= dict.fromkeys(("tiles", "tables", "items", "num_finished"), "*i32")
    strides = ("plane_stride", "q_stride", "out_stride")
    words = ("table_stride", "num_kv_heads", "window")
    types |= dict.fromkeys((*strides, *words), "i32") | {"scale": "fp32", "softcap": "fp32"}
    shapes = {"": HEADS, "-windowed": WINDOWED_HEADS, "-sinks": SINK_HEADS, "-wide": WIDE_HEADS}
    hopper, ampere = attention_shapes.TWICE_LARGE_BYTES, attention_shapes.LARGE_SHARED_BYTES
    constants = partial(attention_launch.context_constants, is_full=False)
    generations = attention_shapes.generation_tiling
    of_generations = attention_launch.generation_constants
    for (suffix, shape), (kept, own, nothing) in product(shapes.items(), _kept(tensor)):
        tile = partial(attention_shapes.context_tiling, shape, dtype.itemsize, in_codes=bool(kept))
        own_generations = generations(shape, dtype.itemsize, in_codes=bool(kept))
        kernels = [
            ("contexts", tile(hopper, 1), constants),
            ("generations", own_generations, of_generations),
        ]
        if not kept:
            kernels += [
                ("contexts-large", tile(hopper, attention_shapes.LARGE_STEP_ROWS), constants),
                ("contexts-ampere", tile(ampere, 1), constants),
                ("contexts-small", tile(ampere - 1, 1), constants),
                ("contexts-full", tile(hopper, 1), partial(constants, is_full=True)),
            ]
        for phase, tiling, constants_of in kernels:
            kernel = getattr(attention, f"attend_{phase.partition('-')[0]}")
            yield Variant(
                f"attention.{phase}{suffix}{kept}.{name}",
                kernel,
                {key: value for key, value in (types | own).items() if key in kernel.arg_names},
                constants_of(shape, tiling, 16)
                | nothing
                | {"WIDEN": False, "HAS_SINKS": shape is SINK_HEADS},
                tiling.num_warps,
                tiling.num_stages,
                strides,
                tiling.max_registers,
            )
    for kept, own, nothing in _kept(tensor):
        yield Variant(
            f"attention.append{kept}.{name}",
            attention.append,
            dict.fromkeys(("k", "v"), tensor)
            | own
            | {"kv_slots": "*i64", "k_stride": "i32", "v_stride": "i32", "plane_stride": "i32"},
            {"TOKENS": 16, "HEAD_DIM": HEADS.head_dim, "BLOCK_DIM": HEADS.block_dim} | nothing,
            num_warps=1,
            divisible=("k_stride", "v_stride", "plane_stride"),
        )


def _kept(tensor: str) -> Iterator[tuple[str, dict[str, str], dict[str, None]]]:
    """Ways to keep keys and values: a part of the name, types and constants."""
    planes, scales = ("k_plane", "v_plane"), ("k_scales", "v_scales")
    yield "", dict.fromkeys(planes, tensor), dict.fromkeys(scales)
    for kept, codes in (("-kv-int8", "*i8"), ("-kv-fp8", "*u8")):
        yield kept, dict.fromkeys(planes, codes) | dict.fromkeys(scales, "*bf16"), {}


def _list_items() -> Variant:
    kernel, constants = item_kernel.list_items, work_items.LIST_CONSTANTS
    types = dict.fromkeys([name for name in kernel.arg_names if name.islower()], "i32")
    types |= {"positions": "*i64", "kv_slots": "*i64", "sequences": "*i32", "items": "*i32"}
    return Variant("attention.list_items", kernel, types, constants, num_warps=1)


def _draw() -> Iterator[Variant]:
    types = dict.fromkeys(("best_scores", "row_scores", "scores", "floors"), "*fp32")
    types |= dict.fromkeys(("first_id", "num_tokens", "num_blocks", "num_rows"), "i32")
    types |= dict.fromkeys(("keys", "inverses", "logs", "row_tokens"), "*i64")
    sizes = {n: getattr(sampling, n) for n in ("BLOCK_TOKENS", "BLOCK_ROWS", "JOINED_BLOCKS")}
    for label in ("best", "draw", "join", "floor"):
        kernel = getattr(sampling, f"{label}_kernel")
        own = types | {"best_tokens": "*i64" if label == "floor" else "*i32"}
        constants = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        own = {name: kind for name, kind in own.items() if name in kernel.arg_names}
        yield Variant(f"sampling.{label}", kernel, own, constants, divisible=("num_tokens",))


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


DELTA_NETS = RecurrenceConfig(tuple(range(24)), 16, 32, 128, 128, 4)
"""Those of Qwen3.5-9B, whose blocks have 512 KiB."""


def _recurrence(dtype: torch.dtype, name: str) -> Iterator[Variant]:
    """Everything between the projections' types is float32."""
    tiling = delta_launch.tiling_for(dtype)
    words = "first_row first_span first_cell x_stride a_stride b_stride".split()
    types = dict.fromkeys(words, "i32") | dict.fromkeys(("x", "a", "b", "out"), f"*{name}")
    floats = "mixed taps arena rates step_bias solutions weights scales".split()
    types |= dict.fromkeys(floats, "*fp32")
    types |= dict.fromkeys(("row_ends", "words", "sources", "targets"), "*i64")
    cells = delta_launch.block_sizes(plan_state(DELTA_NETS, 512 << 10))
    constants = (
        delta_launch.head_sizes(DELTA_NETS)
        | cells
        | {
            "CHANNELS": DELTA_NETS.conv_size,
            "NUM_TAPS": DELTA_NETS.kernel_size,
            "BLOCK_TAPS": DELTA_NETS.kernel_size,
            "CELL_ITEMS": DELTA_NETS.key_dim * DELTA_NETS.value_dim,
            "CHUNK": tiling.chunk_tokens,
            "PRECISION": tiling.precision,
        }
    )
    tile = "BLOCK_TOKENS", "BLOCK_CHANNELS", "BLOCK_VALUES"
    of_prompts = delta_launch.CONV_TOKENS, delta_launch.CONV_CHANNELS, tiling.block_values
    of_single = 1, delta_launch.STEP_CHANNELS, delta_launch.STEP_VALUES
    prompts, single = (dict(zip(tile, sizes, strict=True)) for sizes in (of_prompts, of_single))
    for label, kernel, own, num_warps, num_stages in (
        ("convolve", delta.convolve, prompts, 4, 3),
        ("convolve-single", delta.convolve, single, 4, 3),
        ("step", delta.step, single, 4, 3),
        ("solve_chunks", delta.solve_chunks, prompts, tiling.num_warps, 1),
        ("advance_chunks", delta.advance_chunks, prompts, tiling.num_warps, 1),
    ):
        yield Variant(
            f"recurrence.{label}.{name}",
            kernel,
            {key: value for key, value in types.items() if key in kernel.arg_names},
            {k: v for k, v in (constants | own).items() if k in kernel.arg_names},
            num_warps,
            num_stages,
            divisible=("x_stride", "a_stride", "b_stride"),
        )


def _codes() -> Iterator[Variant]:
    """Products with quantised weights, in groups where int4 is read; and their decoding."""
    types = dict.fromkeys(
        [name for name in linear.multiply_codes.arg_names if name.islower()], "i32"
    )
    types |= dict.fromkeys(("y", "x", "w"), "*bf16") | {"codes": "*i16", "partial": "*fp32"}
    types |= {"scales": "*fp32", "zeros": "*fp32", "scale_stride": "i32", "tickets": "*i32"}
    large, small = linear_launch.LARGE_SHARED_BYTES, linear_launch.TILINGS_SMALL
    for kind in LANES:
        constants = {
            "KIND": kind,
            "GROUP": 64 if kind == "int4" else 0,
            "HAS_ZEROS": False,
            "HAS_EDGE": False,
            "LANE_INPUTS": linear_launch.LANE_INPUTS[kind][0],
            "WIDEN": False,
            "PAIRS": PAIRS[kind],
        }
        is_grouped = kind == "int4"
        found = {
            tiling: ""
            for num_outputs in (4096, 28672)
            for tiling in linear_launch.tilings(
                num_outputs, kind, torch.bfloat16, large, is_grouped=is_grouped
            )
        }
        for tiling, suffix in (found | dict.fromkeys(small, "-small")).items():
            sizes = {"BLOCK_ROWS": tiling.block_rows, "BLOCK_OUTPUTS": tiling.block_outputs}
            yield Variant(
                f"linear.{kind}-{tiling.block_rows}x{tiling.block_outputs}{suffix}.bf16",
                linear.multiply_codes,
                {k: v for k, v in types.items() if k in linear.multiply_codes.arg_names},
                constants | sizes | {"STAGES": tiling.stages},
                tiling.num_warps,
                divisible=("num_outputs", "num_inputs", "x_stride"),
            )
        yield Variant(
            f"linear.{kind}-expand.bf16",
            linear.expand_codes,
            {k: v for k, v in types.items() if k in linear.expand_codes.arg_names},
            constants | {"BLOCK_OUTPUTS": linear_launch.EXPANDED_OUTPUTS},
            divisible=("num_inputs", "scale_stride"),
        )


def _truncate() -> Variant:
    types = dict.fromkeys(("scores", "limits", "bests", "candidates"), "*fp32")
    types |= {"powers": "*i32", "num_tokens": "i32"}
    constants = {
        "BLOCK": truncation.BLOCK_TOKENS,
        "CAPACITY": truncation.BLOCK_TOKENS,
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
    for kept, own, nothing in _kept(tensor):
        yield Variant(
            f"rope.rotate_and_append{kept}.{name}",
            rope.rotate_and_append_kernel,
            dict.fromkeys(("q", "k", "v", "cos", "sin"), tensor)
            | own
            | {"kv_slots": "*i64"}
            | dict.fromkeys(strides, "i32"),
            {
                "NUM_HEADS": 32,
                "NUM_KV_HEADS": 8,
                "BLOCK_HEADS": rope.BLOCK_HEADS,
                "TOKENS": 16,
                "HEAD_DIM": 128,
                "BLOCK_DIM": 128,
                "HALF": 64,
                "BLOCK_HALF": 64,
                **nothing,
            },
            num_warps=2,
            divisible=strides,
        )


def main() -> None:
    """Print one line for each kernel and target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=int, action="append", help="compute capability, as 90")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    args = parser.parse_args()
    print(f"{'kernel':<36}{'target':>8}{'registers':>11}{'spill B':>9}{'shared B':>10}")
    for variant in variants():
        if args.only not in variant.name:
            continue
        for target in args.target or CAPABILITIES:
            used = resources(variant.compile(target))
            print(
                f"{variant.name:<36}{f'sm_{target}':>8}{used.num_registers:>11}"
                f"{used.spill_bytes:>9}{used.shared_bytes:>10}",
                flush=True,
            )


if __name__ == "__main__":
    main()
