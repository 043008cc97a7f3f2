"""Launches that start before the kernel in front of them has finished.

Starting a kernel takes about a microsecond. On GPUs from sm_90 on, a launch with `early_start`
spends it while the kernel in front of it ends. The kernel calls `wait_for_previous` before it
touches memory, so its results are the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex_services.worker.ops.launch import INTERPRETING


@functools.cache
def early_start(device: torch.device) -> dict[str, Any]:
    """Options of a launch whose kernel calls `wait_for_previous(EARLY)`."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": can} | ({"launch_pdl": True} if can else {})


if INTERPRETING:

    @triton.jit
    def wait_for_previous(EARLY: tl.constexpr):
        """Does nothing: programs run one after another."""

    @triton.jit
    def let_next_start(EARLY: tl.constexpr):
        """Does nothing: see above."""

else:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def wait_for_previous(EARLY: tl.constexpr):
        """Wait until the kernel in front has finished, and with it all kernels before it."""
        if EARLY:
            gdc_wait()

    @triton.jit
    def let_next_start(EARLY: tl.constexpr):
        """Let an early launch start once all programs have called this, instead of when they end.
        It still waits for their end, but takes its place on the multiprocessors before."""
        if EARLY:
            gdc_launch_dependents()
