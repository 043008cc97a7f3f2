"""The names and shapes that the tensors of a quantised base would have without quantisation.

A linear's weight is then one matrix `[out, in]`, whatever its codes, scales and zero points look
like in the files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

from loraplex.adapter_format.quantisation import (
    AWQ,
    BLOCKS,
    BNB4,
    BNB8,
    GGUF_BLOCKS,
    GPTQ,
    PACKED,
    PLAIN,
    Quantisation,
)
from loraplex.adapter_format.safetensors_header import TensorInfo
from loraplex.errors import InvalidRequest

FLOAT_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
MAX_STATE_BYTES = 64 * 1024
SCALES_OF = {
    PLAIN: (".weight_scale", ".weight_scale_inv"),
    BLOCKS: (".weight_scale_inv",),
    BNB8: (".SCB",),
}
"""Where the scales of a `weight` that holds codes may be."""
QUANT_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")

Read = Callable[[TensorInfo], bytes]


def logical_tensors(
    tensors: Mapping[str, TensorInfo], quantisation: Quantisation | None, read: Read
) -> dict[str, TensorInfo]:
    """Names and shapes with every quantised linear as one matrix `weight`.

    Args:
        tensors: of the files, by name.
        read: the bytes of a small tensor.

    Raises:
        InvalidRequest: naming a tensor whose layout is not the config's, or that lacks a companion.
    """
    found = {}
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        shape: tuple[int, ...] | None = None
        if last in ("qweight", "weight_packed"):
            shape = _packed_shape(name, module, tensors, quantisation, read)
        elif last == "weight" and info.dtype not in FLOAT_DTYPES and len(info.shape) == 2:
            shape = _coded_shape(name, module, tensors, quantisation, read)
        if shape is not None:
            found[f"{module}.weight"] = replace(info, name=f"{module}.weight", shape=shape)
        elif not (last == "bias" and _is_made_up(module, info, tensors, read)):
            found[name] = info
    return found


def _is_made_up(
    module: str, bias: TensorInfo, tensors: Mapping[str, TensorInfo], read: Read
) -> bool:
    """Whether a bias was only written because writers of GPTQ files always write one."""
    return f"{module}.qweight" in tensors and not any(read(bias))


def _packed_shape(
    name: str,
    module: str,
    tensors: Mapping[str, TensorInfo],
    quantisation: Quantisation | None,
    read: Read,
) -> tuple[int, int]:
    """Shape of the codes behind int32 words that hold several each."""
    scheme = quantisation.scheme_of(module) if quantisation else None
    layouts = (GPTQ, AWQ) if name.endswith(".qweight") else (PACKED,)
    words = tensors[name].shape
    if scheme is None or scheme.layout not in layouts or len(words) != 2:
        raise _unlike(name, quantisation)
    per_word = 32 // scheme.bits
    if scheme.layout == GPTQ:
        return words[1], words[0] * per_word
    if scheme.layout == AWQ:
        return words[1] * per_word, words[0]
    stored = tensors.get(f"{module}.weight_shape")
    if stored is None or (stored.dtype, stored.shape) != ("I64", (2,)):
        raise InvalidRequest.field(f"{module}.weight_shape", "missing", "must be two integers")
    rows, columns = struct.unpack("<2q", read(stored))
    if rows != words[0] or -(-columns // per_word) != words[1]:
        raise InvalidRequest.field(
            stored.name, [rows, columns], f"does not fit {list(words)} words"
        )
    return rows, columns


def _coded_shape(
    name: str,
    module: str,
    tensors: Mapping[str, TensorInfo],
    quantisation: Quantisation | None,
    read: Read,
) -> tuple[int, ...]:
    """Shape of the codes behind a `weight` that is not floating-point."""
    scheme = quantisation.scheme_of(module) if quantisation else None
    layout = scheme.layout if scheme else ""
    if layout in GGUF_BLOCKS:
        _, num_inputs, num_bytes = GGUF_BLOCKS[layout]
        rows, row_bytes = tensors[name].shape
        if tensors[name].dtype != "U8" or row_bytes % num_bytes:
            raise _unlike(name, quantisation)
        return rows, row_bytes // num_bytes * num_inputs
    if layout == BNB4:
        for suffix in QUANT_STATES:
            if (state := tensors.get(module + suffix)) is not None:
                return _shape_in(state, read)
    if not any(module + scale in tensors for scale in SCALES_OF.get(layout, ())):
        raise _unlike(name, quantisation)
    return tensors[name].shape


def _shape_in(state: TensorInfo, read: Read) -> tuple[int, int]:
    """The JSON object that bitsandbytes packs alongside the codes."""
    if state.num_bytes > MAX_STATE_BYTES:
        raise InvalidRequest.field(state.name, f"{state.num_bytes} bytes", "is too long")
    try:
        rows, columns = json.loads(read(state))["shape"]
    except (ValueError, KeyError, TypeError) as error:
        why = f"must be the JSON object of bitsandbytes: {error}"
        raise InvalidRequest.field(state.name, "damaged", why) from error
    if type(rows) is not int or type(columns) is not int or math.prod((rows, columns)) < 1:
        raise InvalidRequest.field(state.name, [rows, columns], "must be a shape")
    return rows, columns


def _unlike(name: str, quantisation: Quantisation | None) -> InvalidRequest:
    said = quantisation.name if quantisation else "no quantization_config"
    why = f"holds codes that config.json does not explain: it says {said}"
    return InvalidRequest.field(name, "quantised", why)
