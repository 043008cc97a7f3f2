"""Properties of the device and of Triton that kernel launches depend on."""

from __future__ import annotations

import functools
import os

import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run as numpy on the CPU; Triton reads the variable when it decorates them."""

_INTERPRETED_PROGRAMS = 3
"""Programs of a fixed grid under the interpreter: more than one, to test that they share work."""


@functools.cache
def num_programs(device: torch.device, per_processor: int) -> int:
    """Size of a fixed grid: `per_processor` for each of the device's multiprocessors."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return per_processor * torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The most shared memory that one program may have."""
    if device.type != "cuda":
        return 1 << 30
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def must_widen(dtype: torch.dtype) -> bool:
    """Whether operands become float32 right after each load: the interpreter keeps bfloat16 as
    raw bits, which only loads, stores and conversions understand."""
    return INTERPRETING and dtype is torch.bfloat16


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, which is above 0."""
    return 1 << (number - 1).bit_length()
