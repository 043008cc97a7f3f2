"""The inputs of one forward pass besides weights: an explicit argument of every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from loraplex_services.worker.layers.routing import RoutingNotes
from loraplex_services.worker.ops.attention.metadata import AttentionMetadata
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.recurrence.backend import StateBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens: contexts, then generations; inside each by first slot, base rows last."""

    input_ids: Tensor
    """int64 `[T]`."""
    positions: Tensor
    """int64 `[T]`, absolute."""
    attention: AttentionMetadata
    lora: LoraBatch
    rope_rows: Tensor | None = None
    """int64 `[T]`: see `layers.ropes.Ropes.row`; None if all rows use the base's row for short
    sequences."""
    states: StateBatch | None = None
    """States of recurrent layers, if the base has any."""
    layer_inputs: Tensor | None = None
    """`[T, layers, width]`: set by the model before its first layer, if layers have inputs of their
    own."""
    query_scales: Tensor | None = None
    """`[T, 1]`: set by the model before its first layer, if queries are scaled by position."""
    read_rows: Tensor | None = None
    """int64 `[n]`, ascending: the only rows whose hidden states after the last layer are read;
    None = others may be read, too."""
    routing: RoutingNotes | None = None
    """Notes the experts of all rows, and `read_rows` is then None; None = nobody asks for them."""
    shared_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of this pass by layer, of layers that others share them with. Layers fill it,
    and it is empty between passes."""
