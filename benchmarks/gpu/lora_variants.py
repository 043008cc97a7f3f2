"""The kernels of the low-rank update, as `kernel_resources` compiles them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from benchmarks.gpu.kernel_variant import Variant
from loraplex_services.worker.ops.lora import launch_plan as lora_plan
from loraplex_services.worker.ops.lora import long_runs, triton_lists, triton_long
from loraplex_services.worker.ops.lora import triton as lora_launch
from loraplex_services.worker.ops.lora import triton_kernels as lora
from loraplex_services.worker.ops.lora.device_records import OutputRange
from loraplex_services.worker.ops.lora.device_tables import SiteShape
from loraplex_services.worker.ops.lora.step_work import MIN_RUNS


def lora_variants(dtypes: Mapping[torch.dtype, str]) -> Iterator[Variant]:
    """Every kernel for each dtype and Triton's name of it."""
    yield _list_groups()
    for dtype, name in dtypes.items():
        yield from _lora(dtype, name)
        yield from _long_runs(dtype, name)


def _list_groups() -> Variant:
    kernel = triton_lists.list_groups
    types = dict.fromkeys([name for name in kernel.arg_names if name.islower()], "i32")
    types |= dict.fromkeys(("runs", "index", "counts", "tile_ends", "done"), "*i32")
    types |= dict.fromkeys(("records", "entries", "lanes", "vectors"), "*i64")
    return Variant("lora.list_groups", kernel, types, {"MAX_RUNS": MIN_RUNS})


QKV = SiteShape(
    4096,
    (OutputRange(0, 0, 4096), OutputRange(0, 4096, 1024), OutputRange(0, 5120, 1024)),
    True,
    False,
)
GATE_UP = SiteShape(4096, (OutputRange(0, 0, 14336), OutputRange(0, 14336, 14336)), True, False)
DOWN = SiteShape(14336, (OutputRange(0, 0, 4096),), True, False)
CUT = SiteShape(4096, (OutputRange(0, 0, 4000), OutputRange(0, 4000, 1000)), False, True)
"""Sites of Llama-3-8B: three parts, the most outputs, and the most partial sums; and one with rows
longer than a block."""


def _lora(dtype: torch.dtype, name: str) -> Iterator[Variant]:
    kernel = lora.update_site
    types = dict.fromkeys([name for name in kernel.arg_names if name.islower()], "i32")
    types |= dict.fromkeys(("y", "x", "weight", "arena", "h"), f"*{name}")
    types |= dict.fromkeys(("partial", "vector_arena"), "*fp32")
    types |= dict.fromkeys(("entries", "lanes", "vectors"), "*i64")
    types |= dict.fromkeys(("counts", "tile_ends", "tickets", "done"), "*i32")
    is_half = dtype is not torch.float32
    for site, shape in (("qkv", QKV), ("gate_up", GATE_UP), ("down", DOWN)):
        num_outputs = shape.parts[-1].end
        apart = lora_plan.expand_plan(64, num_outputs, dtype.itemsize)
        launches = [("shrink", apart, True, False), ("expand", apart, False, True)]
        if is_half:
            launches.append(("fused", lora_plan.fused_plan(num_outputs), True, True))
        for launch, plan, shrinks, expands in launches:
            for int8 in (False, True) if dtype is torch.bfloat16 and site == "qkv" else (False,):
                yield Variant(
                    f"lora.{launch}{'-int8' * int8}-{site}.{name}",
                    kernel,
                    types | ({"arena": "*i8"} if int8 else {}),
                    lora_launch.constants_of(plan, shape, dtype, int8, shrinks, expands),
                    plan.num_warps,
                    divisible=("x_stride", "y_stride", "num_inputs"),
                )


def _long_runs(dtype: torch.dtype, name: str) -> Iterator[Variant]:
    tensors = dict.fromkeys(("y", "x", "arena"), f"*{name}")
    tensors |= dict.fromkeys(("partial", "h", "vector_arena"), "*fp32")
    tensors |= dict.fromkeys(("tiles", "tickets", "index"), "*i32") | {"records": "*i64"}
    for launch, kernel, constants_of in (
        ("shrink", triton_long.shrink_long, long_runs.shrink_constants),
        ("expand", triton_long.expand_long, long_runs.expand_constants),
    ):
        types = dict.fromkeys([name for name in kernel.arg_names if name.islower()], "i32")
        types |= {name: kind for name, kind in tensors.items() if name in types}
        is_bfloat16 = dtype is torch.bfloat16
        kinds = [("qkv", QKV, False), *[("int8-qkv", QKV, True), ("cut", CUT, False)] * is_bfloat16]
        for site, shape, int8 in kinds:
            constants = constants_of(shape, dtype, int8)
            num_warps, most = constants.pop("num_warps"), constants.pop("maxnreg")
            yield Variant(
                f"lora.long-{launch}-{site}.{name}",
                kernel,
                types | ({"arena": "*i8"} if int8 else {}),
                constants,
                num_warps,
                divisible=("x_stride", "y_stride", "num_inputs"),
                max_registers=most,
            )
