"""GPTQ: `qweight` and `qzeros` of int32 words, float `scales`, and `g_idx` in any order.

Words of `qweight` hold neighbouring inputs of one output, words of `qzeros` neighbouring outputs.
Files of the first version store every zero point less one, subtracted from whole words.
"""

from __future__ import annotations

from torch import Tensor

from loraplex.adapter_format.quantisation import Scheme
from loraplex_services.worker.model.formats.words import (
    StoredTensors,
    column_order,
    number_of_groups,
    signed,
    stored,
    stored_scales,
    unpacked,
)
from loraplex_services.worker.ops.linear.coded import INTEGERS, CodedWeight


def read(files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme) -> CodedWeight:
    """See `ReadWeight`."""
    (num_outputs, num_inputs), bits = shape, scheme.bits
    per_word = 32 // bits
    num_groups, group_size = number_of_groups(num_inputs, scheme.group_size)
    words = stored(files, f"{module}.qweight", (num_inputs // per_word, num_outputs))
    codes = unpacked(words.T.contiguous(), bits)
    zero_words = stored(files, f"{module}.qzeros", (num_groups, num_outputs // per_word))
    if scheme.zero_step:  # whole words, as writers subtract: a zero point of 0 borrows
        zero_words = zero_words + sum(1 << bits * index for index in range(per_word))
    zeros = unpacked(zero_words, bits).int()
    scales = stored_scales(files, f"{module}.scales", (num_groups, num_outputs)).T.contiguous()
    order = None
    if files.has(name := f"{module}.g_idx"):
        groups = stored(files, name, (num_inputs,))
        order = column_order(name, groups, num_groups, group_size)
    if order is not None:
        codes = codes[:, order]
    table: Tensor | None = INTEGERS
    if bits == 8:
        codes, zeros, table = signed(codes), zeros - 128, None
    return CodedWeight(
        scheme.name, codes, scales, group_size, zeros.T.float().contiguous(), table, order
    )
