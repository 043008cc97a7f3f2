"""Writes `golden/`: small weights as the libraries that define the formats pack and unpack them.

    python -m tests.worker.model.formats.write_golden

It needs compressed-tensors 0.20, bitsandbytes 0.50, GPTQModel 7.7, autoawq 0.2.9 and transformers,
which the project does not depend on: run it in an environment of its own. Each file holds what a
library saves for the module `linear`, the weight that it unpacks (`expected`), and the
`quantization_config` of its config.json in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).with_name("golden")
OUT, IN, GROUP = 32, 64, 32
Golden = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def _weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)).to(dtype)


def compressed(layout: str, **fields: Any) -> Golden:
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    module = torch.nn.Linear(IN, OUT, bias=False)
    module.weight.data = _weight()
    shape: tuple[int, ...] = (OUT, 1, IN)
    if args.strategy == "group":
        shape = OUT, IN // GROUP, GROUP
    elif args.strategy == "tensor":
        shape = 1, 1, OUT * IN
    groups = module.weight.data.view(shape)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    if args.strategy == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    module.weight_scale = torch.nn.Parameter(scale.bfloat16(), requires_grad=False)
    module.weight_zero_point = torch.nn.Parameter(
        zero.to(args.pytorch_dtype()), requires_grad=False
    )
    module.quantization_scheme = scheme
    compress_module(module)
    tensors = {f"linear.{name}": value.clone() for name, value in module.state_dict().items()}
    decompress_module(module)
    group = json.loads(scheme.model_dump_json())
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return tensors, module.weight.data, config


def gptq(bits: int, *, desc_act: bool, layout: str = "gptq") -> Golden:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = _weight(torch.float16)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(IN, generator=generator) if desc_act else torch.arange(IN)
    g_idx = torch.empty(IN, dtype=torch.int32)
    g_idx[order] = (torch.arange(IN) // GROUP).int()
    largest = (1 << bits) - 1
    grouped = linear.weight.data.float()[:, order].view(OUT, -1, GROUP)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / largest).half().float()
    zeros = (-low / scales).round().clamp(0, largest)
    codes = (linear.weight.data.float() / scales[:, g_idx] + zeros[:, g_idx]).round()
    codes = codes.clamp(0, largest)
    linear.weight.data = ((codes - zeros[:, g_idx]) * scales[:, g_idx]).half()
    packed = TorchLinear(bits, GROUP, False, desc_act, IN, OUT)
    packed.pack_original(linear, scales, zeros, g_idx)
    packed.post_init()
    expected = packed.dequantize_weight().T.contiguous()
    if layout == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, QuantizeConfig(bits=bits, group_size=GROUP))
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {f"linear.{name}": getattr(packed, name).clone() for name in names}
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": desc_act,
        "sym": False,
        "lm_head": False,
        "checkpoint_format": layout,
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05},
    }
    return tensors, expected, config


def awq() -> Golden:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(IN, OUT, bias=False)
    grouped = _weight().view(OUT, -1, GROUP)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).view(OUT, IN).half()
    packed = WQLinear_GEMM.from_linear(
        linear, 4, GROUP, False, scales.half().T.contiguous(), zeros.T.contiguous()
    )
    expected = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP)
    tensors = {f"linear.{name}": value.clone() for name, value in packed.state_dict().items()}
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    return tensors, expected.T.contiguous(), config


def four_bits(quant_type: str, *, is_nested: bool) -> Golden:
    import bitsandbytes
    from transformers import BitsAndBytesConfig

    module = bitsandbytes.nn.Linear4bit(IN, OUT, bias=False, quant_type=quant_type)
    module.weight = bitsandbytes.nn.Params4bit(
        _weight(torch.bfloat16),
        requires_grad=False,
        quant_type=quant_type,
        compress_statistics=is_nested,
    )
    module = module.to("cpu")
    # The table's values in full: the library's own result is rounded to the type of the weight.
    module.weight.quant_state.dtype = torch.float32
    expected = bitsandbytes.functional.dequantize_4bit(
        module.weight.data, module.weight.quant_state
    )
    tensors = {f"linear.{name}": value.clone() for name, value in module.state_dict().items()}
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=is_nested
    )
    return tensors, expected, config.to_dict()


def eight_bits() -> Golden:
    import bitsandbytes
    from transformers import BitsAndBytesConfig

    module = bitsandbytes.nn.Linear8bitLt(IN, OUT, bias=False, has_fp16_weights=False)
    module.load_state_dict({"weight": _weight()})
    module = module.to("cpu")
    tensors = {f"linear.{name}": value.clone() for name, value in module.state_dict().items()}
    expected = bitsandbytes.functional.int8_vectorwise_dequant(
        tensors["linear.weight"], tensors["linear.SCB"]
    )
    return tensors, expected, BitsAndBytesConfig(load_in_8bit=True).to_dict()


def blocks() -> Golden:
    """The arithmetic is transformers' own; the scales are drawn here."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    generator = torch.Generator().manual_seed(0)
    codes = _weight().to(torch.float8_e4m3fn)
    scales = torch.rand(OUT // 16, IN // 32, generator=generator) + 0.5
    expected = _dequantize_fp8_weight(codes, scales, (16, 32), torch.float32)
    tensors = {"linear.weight": codes, "linear.weight_scale_inv": scales}
    return tensors, expected, FineGrainedFP8Config(weight_block_size=(16, 32)).to_dict()


GOLDEN: dict[str, Callable[[], Golden]] = {
    "ct-int8-channel": lambda: compressed("int-quantized", num_bits=8, strategy="channel"),
    "ct-int8-packed": lambda: compressed("pack-quantized", num_bits=8, strategy="channel"),
    "ct-int4-group": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=GROUP
    ),
    "ct-int4-group-asymmetric": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False
    ),
    "ct-fp8-channel": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="channel"
    ),
    "ct-fp8-tensor": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="tensor"
    ),
    "gptq-int4": lambda: gptq(4, desc_act=False),
    "gptq-int4-act-order": lambda: gptq(4, desc_act=True),
    "gptq-int8-v2": lambda: gptq(8, desc_act=False, layout="gptq_v2"),
    "awq-int4": awq,
    "bnb-nf4": lambda: four_bits("nf4", is_nested=False),
    "bnb-nf4-nested": lambda: four_bits("nf4", is_nested=True),
    "bnb-fp4": lambda: four_bits("fp4", is_nested=True),
    "bnb-int8": eight_bits,
    "fp8-blocks": blocks,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in GOLDEN.items():
        tensors, expected, config = make()
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        metadata = {"quantization_config": json.dumps(config, default=str)}
        save_file({**tensors, "expected": expected}, FOLDER / f"{name}.safetensors", metadata)
        print(name, {key: (str(v.dtype), tuple(v.shape)) for key, v in tensors.items()})
