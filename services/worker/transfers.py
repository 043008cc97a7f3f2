"""Copies between host and device in stream order, without waiting for a running step.

A copy from or to memory that is not pinned waits for all work on the stream, which on a GPU is the
previous step. Pinned memory returns to its pool when the copy is done.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

COPY_ALIGNMENT = 16
"""Every array of an `Upload` starts at a multiple of this number of bytes."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, copied to `device` without waiting."""
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """A tensor of the device, copied to the host. Read it only when the work that its stream has so
    far is done.
    """
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Overwrite `target` with a tensor of the host."""
    if target.is_cuda:
        source = source.contiguous().pin_memory()
    target.copy_(source, non_blocking=True)


class Upload:
    """Named arrays that go to a device in one copy."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, array: np.ndarray) -> None:
        """Add an array to the copy."""
        assert name not in self._arrays, name
        self._arrays[name] = np.ascontiguousarray(array)

    def send(self, device: torch.device) -> None:
        """Copy all arrays to `device`, in stream order."""
        begins, num_bytes = {}, 0
        for name, array in self._arrays.items():
            begins[name] = num_bytes
            num_bytes += -(-array.nbytes // COPY_ALIGNMENT) * COPY_ALIGNMENT
        if num_bytes == 0:
            return
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        data = host.numpy()
        for name, array in self._arrays.items():
            begin = begins[name]
            data[begin : begin + array.nbytes] = array.view(np.uint8).reshape(-1)
        sent = host.to(device, non_blocking=True)
        for name, array in self._arrays.items():
            dtype = torch.from_numpy(array[:0]).dtype
            part = sent[begins[name] : begins[name] + array.nbytes]
            self._tensors[name] = part.view(dtype).view(array.shape)

    def __contains__(self, name: str) -> bool:
        """Whether there is such an array."""
        return name in self._arrays

    def __getitem__(self, name: str) -> Tensor:
        """An array on the device."""
        return self._tensors[name]
