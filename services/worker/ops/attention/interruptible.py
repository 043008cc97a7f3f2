"""Attention that a capture of a forward pass leaves out.

A forward pass that is captured in several graphs ends one graph before each layer's attention and
begins the next one after it. The model does not know: it calls its attention backend as always, and
the metadata of such a pass takes the call instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from loraplex_services.worker.ops.attention.backend import (
    AttentionMask,
    AttentionMetadata,
    RotatingBackend,
)

CosSin: TypeAlias = tuple[Tensor, Tensor]
Interrupt: TypeAlias = Callable[[RotatingBackend, Tensor, Tensor, Tensor, CosSin], Tensor]
"""(backend, q, k, v, cosines and sines) -> what attention returns."""


def _not_set(*args: object) -> Tensor:
    raise AssertionError("the capture sets what interrupts it")


@dataclass(slots=True)
class InterruptingMetadata(AttentionMetadata):
    """Stands for a step whose attention is not part of what is captured."""

    interrupt: Interrupt = _not_set


class InterruptibleAttention:
    """A backend of one layer that such a pass can leave out. Implements `RotatingBackend`."""

    def __init__(self, backend: RotatingBackend) -> None:
        self._backend = backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        attention_mask: AttentionMask = AttentionMask.CAUSAL,
    ) -> Tensor:
        """The backend's."""
        return self._backend.forward(q, k, v, metadata, attention_mask)

    def rotate_and_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: CosSin, metadata: AttentionMetadata
    ) -> Tensor:
        """The backend's, unless the metadata takes the call."""
        if isinstance(metadata, InterruptingMetadata):
            return metadata.interrupt(self._backend, q, k, v, cos_sin)
        return self._backend.rotate_and_forward(q, k, v, cos_sin, metadata)
