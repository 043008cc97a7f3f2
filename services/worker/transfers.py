"""Between host and device in stream order: nothing here waits for a step that is under way.

A copy from or to memory that is not pinned waits for all that the stream has been given, which on
a GPU is the step before. Pinned memory goes back to its pool when the copy is done.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """What the host holds, on `device`."""
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """What a device holds, to be read once all that its stream has been given until now is done."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Overwrite `target` with what the host holds."""
    if target.is_cuda:
        source = source.contiguous().pin_memory()
    target.copy_(source, non_blocking=True)
