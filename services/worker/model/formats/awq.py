"""AWQ, version `gemm`: four-bit codes in an order that suits a GPU kernel.

`qweight` and `qzeros` consist of int32 words that hold eight outputs each; `scales` are floats.
"""

from __future__ import annotations

from loraplex.adapter_format.quantisation import Scheme
from loraplex_services.worker.model.formats.words import (
    StoredTensors,
    number_of_groups,
    stored,
    stored_scales,
    unpacked,
)
from loraplex_services.worker.ops.linear.coded import INTEGERS, CodedWeight

NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output of a word each of its codes belongs to, lowest bits first."""


def read(files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme) -> CodedWeight:
    """See `ReadWeight`."""
    num_outputs, num_inputs = shape
    num_groups, group_size = number_of_groups(num_inputs, scheme.group_size)
    words = stored(files, f"{module}.qweight", (num_inputs, num_outputs // 8))
    zero_words = stored(files, f"{module}.qzeros", (num_groups, num_outputs // 8))
    scales = stored_scales(files, f"{module}.scales", (num_groups, num_outputs))
    return CodedWeight(
        scheme.name,
        unpacked(words, 4, NIBBLE_ORDER).T.contiguous(),
        scales.T.contiguous(),
        group_size,
        unpacked(zero_words, 4, NIBBLE_ORDER).T.float().contiguous(),
        INTEGERS,
    )
