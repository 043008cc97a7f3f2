"""The formats of bitsandbytes: four bits with a table and a scale for each block, and int8 by rows.

In four bits, blocks run over the flattened weight. Their scales (`absmax`) may be eight-bit codes
themselves, with a table, an offset, and scales for blocks of their own.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from loraplex.adapter_format.quantisation import Scheme
from loraplex.adapter_format.quantised_tensors import QUANT_STATES
from loraplex.errors import InvalidRequest
from loraplex_services.worker.model.formats.words import (
    StoredTensors,
    checked,
    stored,
    stored_scales,
)
from loraplex_services.worker.ops.linear.coded import CodedWeight


def read_four_bits(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`."""
    state, name = _state(files, module)
    if state.get("shape") != list(shape):
        raise InvalidRequest.field(name, state.get("shape"), f"config.json asks for {list(shape)}")
    num_outputs, num_inputs = shape
    block_size, num_items = int(state["blocksize"]), math.prod(shape)
    pairs = stored(files, f"{module}.weight", (-(-num_items // 2), 1))
    codes = torch.stack((pairs >> 4, pairs & 0x0F), dim=-1).flatten()[:num_items].view(shape)
    scales = _block_scales(files, module, state, -(-num_items // block_size))
    group_size = math.gcd(num_inputs, block_size)
    starts = torch.arange(0, num_items, group_size, device=scales.device)
    scales = scales[starts // block_size].view(num_outputs, -1)
    table = stored_scales(files, f"{module}.weight.quant_map", (16,)).float().cpu()
    kind = f"bnb-{state['quant_type']}-g{group_size}"
    return CodedWeight(kind, codes, scales, group_size, table=table)


def _state(files: StoredTensors, module: str) -> tuple[dict[str, Any], str]:
    """The object that is packed alongside the codes, and the tensor's name."""
    for suffix in QUANT_STATES:
        if files.has(name := module + suffix):
            try:
                state = json.loads(bytes(files.stored(name).tolist()))
                return {**state, "blocksize": int(state["blocksize"])}, name
            except (ValueError, KeyError, TypeError) as error:
                why = f"must be the JSON object of bitsandbytes: {error}"
                raise InvalidRequest.field(name, "damaged", why) from error
    name = module + QUANT_STATES[0]
    raise InvalidRequest.field(name, "missing", "the base's files lack this tensor")


def _block_scales(
    files: StoredTensors, module: str, state: dict[str, Any], num_blocks: int
) -> Tensor:
    """float32 `[blocks]`."""
    name = f"{module}.weight.absmax"
    if not files.has(f"{module}.weight.nested_absmax"):
        return stored_scales(files, name, (num_blocks,)).float()
    codes = stored(files, name, (num_blocks,))
    nested_size = int(state["nested_blocksize"])
    num_nested = -(-num_blocks // nested_size)
    own = stored_scales(files, f"{module}.weight.nested_absmax", (num_nested,)).float()
    table = stored(files, f"{module}.weight.nested_quant_map", (256,)).float()
    blocks = torch.arange(num_blocks, device=own.device) // nested_size
    return checked(name, table[codes.int()] * own[blocks] + float(state["nested_offset"]))


def read_eight_bits(
    files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
) -> CodedWeight:
    """See `ReadWeight`. A row's scale is its largest magnitude, which has the code 127."""
    codes = stored(files, f"{module}.weight", shape)
    scales = stored_scales(files, f"{module}.SCB", (shape[0],)).float()[:, None] / 127
    name = f"{module}.weight_format"
    if files.has(name) and int(files.stored(name)) != 0:
        raise InvalidRequest.field(name, "not 0", "only rows in their plain order are served")
    return CodedWeight(scheme.name, codes, scales, shape[1])
