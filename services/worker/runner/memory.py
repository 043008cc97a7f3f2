"""Chooses the size of the arena, from memory that is measured after the weights are loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex.errors import InvalidRequest

logger = logging.getLogger(__name__)

DEFAULT_GPU_UTILIZATION = 0.9
MAX_DEFAULT_CPU_BYTES = 1 << 30
HOST_CACHE_SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """The requested sizes; all zero = the default of the device."""

    num_bytes: int = 0
    share: float = 0.0
    """Share of the memory that is free after the load and the largest step."""
    gpu_utilization: float = 0.0
    """Share of a GPU's memory that the worker uses altogether; 0 = DEFAULT_GPU_UTILIZATION."""

    def choose(self, memory: MemoryState, step_bytes: Callable[[], int], *, is_gpu: bool) -> int:
        """Bytes of the arena.

        Args:
            memory: of the device, with the weights loaded.
            step_bytes: runs the largest step and returns the bytes that it needs in addition.

        Raises:
            InvalidRequest: nothing is left, or more is asked for than the device has.
        """
        if self.gpu_utilization and not is_gpu:
            logger.warning(
                "gpu_memory_utilization has no effect on a CPU; kv_memory sets the size there"
            )
        if self.num_bytes > memory.total_bytes:
            why = f"is more than the {memory.total_bytes} bytes of memory that there are; lower it"
            raise InvalidRequest.field("kv_memory", self.num_bytes, why)
        if self.num_bytes:
            return self.num_bytes
        if self.share:
            return _some(int(self.share * (memory.free_bytes - step_bytes())), "kv_memory", memory)
        if not is_gpu:
            return min(MAX_DEFAULT_CPU_BYTES, memory.total_bytes // 8)
        utilization = self.gpu_utilization or DEFAULT_GPU_UTILIZATION
        used_bytes = memory.total_bytes - memory.free_bytes + step_bytes()
        left_bytes = int(utilization * memory.total_bytes) - used_bytes
        return _some(left_bytes, "gpu_memory_utilization", memory)


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory of a device."""

    free_bytes: int
    total_bytes: int


def memory_of(device: torch.device) -> MemoryState:
    """Memory of a GPU, including what other processes use; on the host, what is available without
    swapping, within the limit of this process's control group."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return MemoryState(*torch.cuda.mem_get_info(device))
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free_bytes = _available_bytes(total_bytes)
    limit = _read_number(_CGROUP / "memory.max")
    if limit is not None and limit < total_bytes:
        used_bytes = (_read_number(_CGROUP / "memory.current") or 0) - _inactive_file_bytes()
        return MemoryState(min(free_bytes, max(0, limit - used_bytes)), limit)
    return MemoryState(free_bytes, total_bytes)


def default_host_cache_bytes(host: MemoryState, num_gpus: int) -> int:
    """Pinned host memory for the adapters of one GPU: its part of a quarter of the memory, because
    every GPU of a machine may have a worker."""
    return int(HOST_CACHE_SHARE * host.total_bytes) // max(1, num_gpus)


def _available_bytes(total_bytes: int) -> int:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return total_bytes // 2


def _inactive_file_bytes() -> int:
    """Page cache of this control group that Linux reclaims first, such as the files of the base."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, KeyError, ValueError):
        return 0


def _read_number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _some(num_bytes: int, field: str, memory: MemoryState) -> int:
    if num_bytes <= 0:
        why = (
            f"leaves nothing for KV cache and adapters: {memory.free_bytes} of "
            f"{memory.total_bytes} bytes are free with the weights loaded, before the largest "
            "step; raise it, or lower --max-num-batched-tokens"
        )
        raise InvalidRequest.field(field, num_bytes, why)
    return num_bytes
