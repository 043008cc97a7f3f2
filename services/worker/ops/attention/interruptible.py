"""Attention that the capture of a forward pass leaves out.

A forward pass that is captured in several graphs ends one graph before each layer's attention and
begins the next one after it. The model calls its attention backend as always, and the metadata of
such a pass handles the call instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from loraplex_services.worker.ops.attention.backend import AttentionBackend
from loraplex_services.worker.ops.attention.metadata import AttentionMetadata

Interrupt: TypeAlias = Callable[[AttentionBackend, Tensor, Tensor, Tensor], Tensor]
"""(backend, q, k, v) -> what attention returns."""


def _not_set(*args: object) -> Tensor:
    raise AssertionError("the capture sets what interrupts it")


@dataclass(slots=True)
class InterruptingMetadata(AttentionMetadata):
    """Metadata of a step whose attention is not captured."""

    interrupt: Interrupt = _not_set


def forward_interruptibly(
    backend: AttentionBackend,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    metadata: AttentionMetadata,
) -> Tensor:
    """The backend's `forward` with the causal mask, unless the metadata takes the call."""
    if isinstance(metadata, InterruptingMetadata):
        return metadata.interrupt(backend, *backend.split(q, k, v))
    return backend.forward(q, k, v, metadata)
