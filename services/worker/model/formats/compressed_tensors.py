"""The layouts of the compressed-tensors library, and float8 with one scale or one for each block.

`weight_packed` holds neighbouring inputs in int32 words, lowest bits first, as code + 2^(bits - 1).
Otherwise `weight` holds int8 or float8 values. Scales are for the whole weight, each row, each
group of a row, or each block of rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.adapter_format.quantisation import BLOCKS, Scheme
from loraplex.errors import InvalidRequest
from loraplex_services.worker.model.formats.words import (
    StoredTensors,
    column_order,
    number_of_groups,
    signed,
    stored,
    stored_scales,
    unpacked,
)
from loraplex_services.worker.ops.linear.coded import FLOAT8, INTEGERS, CodedWeight


def read_packed(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`."""
    (num_outputs, num_inputs), bits = shape, scheme.bits
    per_word = 32 // bits
    published = stored(files, f"{module}.weight_shape", (2,)).tolist()
    if published != list(shape):
        why = f"config.json asks for shape {list(shape)}"
        raise InvalidRequest.field(f"{module}.weight_shape", published, why)
    words = stored(files, f"{module}.weight_packed", (num_outputs, -(-num_inputs // per_word)))
    codes = unpacked(words, bits)[:, :num_inputs]
    scales, group_size = _scales(files, module, shape, scheme)
    zeros = None
    if not scheme.symmetric:
        num_words = -(-num_outputs // per_word)
        zero_words = stored(files, f"{module}.weight_zero_point", (num_words, scales.shape[1]))
        zeros = unpacked(zero_words.T.contiguous(), bits).T[:num_outputs].float().contiguous()
    order = None
    if files.has(name := f"{module}.weight_g_idx"):
        groups = stored(files, name, (num_inputs,))
        if not groups.eq(-1).all():  # -1 = not used
            order = column_order(name, groups, scales.shape[1], group_size)
            codes = codes if order is None else codes[:, order]
    if bits == 8:
        zeros = None if zeros is None else zeros - 128
        return CodedWeight(scheme.name, signed(codes), scales, group_size, zeros, None, order)
    table = INTEGERS if zeros is not None else INTEGERS - 8
    return CodedWeight(scheme.name, codes.contiguous(), scales, group_size, zeros, table, order)


def read_plain(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`."""
    codes = stored(files, f"{module}.weight", shape)
    wanted = FLOAT8 if scheme.is_float else torch.int8
    if codes.dtype is not wanted:
        why = f"quantization_config asks for {wanted}"
        raise InvalidRequest.field(f"{module}.weight", codes.dtype, why)
    if scheme.is_float and (codes.view(torch.uint8) & 0x7F == 0x7F).any():
        raise InvalidRequest.field(f"{module}.weight", "NaN", "codes must be numbers")
    if scheme.block is not None:
        scales, group_size = _block_scales(files, module, shape, scheme)
    else:
        scales, group_size = _scales(files, module, shape, scheme)
    zeros = None
    if not scheme.symmetric:
        name = f"{module}.weight_zero_point"
        zeros = _by_row(stored(files, name, *_scale_shapes(shape, scheme)), shape[0]).float()
    return CodedWeight(scheme.name, codes, scales, group_size, zeros)


def _scale_shapes(shape: tuple[int, int], scheme: Scheme) -> list[tuple[int, ...]]:
    num_groups, _ = number_of_groups(shape[1], scheme.group_size)
    own: list[tuple[int, ...]] = [(shape[0], num_groups)]
    return own if scheme.group_size else [*own, (shape[0],), (), (1,), (1, 1)]


def _scales(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> tuple[Tensor, int]:
    """(`[out, groups]`, inputs of a group)."""
    _, group_size = number_of_groups(shape[1], scheme.group_size)
    name = f"{module}.weight_scale"
    if files.has(inverse := f"{name}_inv"):  # transformers' name for the scale of a whole weight
        name = inverse
    scales = stored_scales(files, name, *_scale_shapes(shape, scheme))
    return _by_row(scales, shape[0]), group_size


def _by_row(values: Tensor, num_outputs: int) -> Tensor:
    """`[out, groups]`, from one value for each row or for all of them."""
    if values.numel() == 1:
        return values.reshape(1, 1).expand(num_outputs, 1).contiguous()
    return values.reshape(num_outputs, -1)


def _block_scales(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> tuple[Tensor, int]:
    """Each row's, from those of blocks of rows."""
    assert scheme.block is not None
    num_rows, num_columns = scheme.block
    blocks = -(-shape[0] // num_rows), -(-shape[1] // num_columns)
    suffix = "weight_scale_inv" if scheme.layout == BLOCKS else "weight_scale"
    scales = stored_scales(files, f"{module}.{suffix}", blocks)
    return scales.repeat_interleave(num_rows, 0)[: shape[0]].contiguous(), num_columns
