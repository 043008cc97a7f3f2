"""Blocks of GGUF files, as ggml defines them: consecutive inputs of a row with their scales.

Blocks with one scale become codes. Blocks of the K types, which contain several scales and offsets,
are dequantised by the gguf library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.adapter_format.quantisation import GGUF_BLOCKS, Scheme
from loraplex.errors import Unsupported
from loraplex_services.worker.model.formats.gguf_folder import INSTALL
from loraplex_services.worker.model.formats.words import StoredTensors, checked, stored
from loraplex_services.worker.ops.linear.coded import INTEGERS, CodedWeight

CHUNK_ROWS = 4096
"""Rows that numpy dequantises at once."""


def read_q8_0(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`. A block is a float16 scale and 32 int8 codes."""
    blocks = _blocks(files, module, shape, scheme.layout)
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return CodedWeight(scheme.name, codes, _scales(blocks, module), 32)


def read_q4_0(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`. A block is a float16 scale and 16 bytes: the first 16 inputs lie in their
    lower halves, the others in the upper ones."""
    blocks = _blocks(files, module, shape, scheme.layout)
    pairs = blocks[..., 2:]
    codes = torch.cat((pairs & 0x0F, pairs >> 4), dim=2).flatten(1)
    return CodedWeight(scheme.name, codes, _scales(blocks, module), 32, table=INTEGERS - 8)


def dequantised(files: StoredTensors, module: str, shape: tuple[int, int], layout: str) -> Tensor:
    """float32 `[out, in]`, of any layout of `GGUF_BLOCKS`.

    Raises:
        InvalidRequest: the tensor does not fit the shape.
        Unsupported: the gguf library is not installed.
    """
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        why = f"needs the gguf library, which is not installed; run {INSTALL}"
        raise Unsupported.field(f"{module}.weight", layout, why) from None
    kind = GGMLQuantizationType[layout.removeprefix("gguf-")]
    blocks = _blocks(files, module, shape, layout).flatten(1)
    values = torch.empty(shape, device=blocks.device)
    for begin in range(0, len(blocks), CHUNK_ROWS):
        rows = blocks[begin : begin + CHUNK_ROWS].cpu().numpy()
        values[begin : begin + len(rows)] = torch.from_numpy(quants.dequantize(rows, kind))
    return checked(f"{module}.weight", values)


def _blocks(files: StoredTensors, module: str, shape: tuple[int, int], layout: str) -> Tensor:
    """uint8 `[out, blocks, bytes]`."""
    _, num_inputs, num_bytes = GGUF_BLOCKS[layout]
    num_blocks = -(-shape[1] // num_inputs)
    rows = stored(files, f"{module}.weight", (shape[0], num_blocks * num_bytes))
    return rows.view(shape[0], num_blocks, num_bytes)


def _scales(blocks: Tensor, module: str) -> Tensor:
    """float16 `[out, blocks]`, the first two bytes of each."""
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    return checked(f"{module}.weight", scales)
