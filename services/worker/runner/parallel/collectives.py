"""The collectives that steps use, over `torch.distributed`: gloo on CPUs, NCCL on GPUs.

Ranks find each other through a store of rank 0. The store and gloo's sockets listen at the address
at which a rank is reached, which is that of the loopback interface for a group on one machine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from loraplex_services.worker.runner.parallel.messages import RankLost
from loraplex_services.worker.types.sharding import Shard

COLLECTIVE_TIMEOUT_S = 300.0
"""Time limit of one collective in seconds. The ranks run the same step and wait for the slowest; a
rank that ends is noticed immediately."""


@dataclass(slots=True)
class Traffic:
    """The traffic of the collectives of one rank."""

    num_calls: int = 0
    sent_bytes: float = 0.0
    """Bytes sent by this rank in ring algorithms: 2 (N - 1) / N of a sum's bytes, (N - 1) / N of
    those that a gather brings together or a broadcast copies."""


@dataclass(slots=True)
class TorchRanks:
    """Implements `layers.ranks.Ranks`."""

    shard: Shard
    num_local: int
    """See `Ranks`."""
    group: Any
    """A process group of torch, made for this purpose. There is no default group."""
    traffic: Traffic = field(default_factory=Traffic)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        x = x.contiguous()
        self._count(2 * x.nbytes)
        self._wait(lambda: self.group.allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        flat = x.flatten()
        out = flat.new_empty(self.shard.size * len(flat))
        self._count(out.nbytes)
        self._wait(lambda: self.group._allgather_base(out, flat))
        return out.view(self.shard.size, *x.shape)

    def gather(self, x: Tensor, num_columns: int) -> Tensor:
        """See `Ranks`."""
        size = self.shard.size
        self._count(size * x.nbytes)
        parts = [torch.empty_like(x) for _ in range(size)] if self.shard.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        outputs = [parts] if parts else []
        self._wait(lambda: self.group.gather(outputs, [x.contiguous()], options))
        if not parts:
            return x.new_zeros(len(x), num_columns)
        return torch.cat(parts, dim=1)[:, :num_columns].contiguous()

    def broadcast(self, x: Tensor) -> None:
        """See `Ranks`."""
        self._count(x.nbytes)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait(lambda: self.group.broadcast([x], options))

    def _count(self, num_bytes: int) -> None:
        size = self.shard.size
        self.traffic.num_calls += 1
        self.traffic.sent_bytes += num_bytes * (size - 1) / size

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise RankLost(f"a collective of rank {self.shard.rank} failed: {error}") from error


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one rank meets the others."""

    host: str
    """Its own address, as the others reach it."""
    store: TCPStore
    timeout_s: float
    num_local: int
    """Number of ranks on this machine."""


def open_store(host: str, timeout_s: float) -> TCPStore:
    """The store of rank 0, on a free port of `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        *(host, port, None, True, timedelta(seconds=timeout_s), False),
        master_listen_fd=listener.detach(),
    )


def reach_store(address: tuple[str, int], timeout_s: float) -> TCPStore:
    """The store of rank 0. Raises RankLost."""
    try:
        return TCPStore(*address, None, False, timedelta(seconds=timeout_s), False)
    except RuntimeError as error:  # dist.DistError is one
        raise RankLost(f"tensor_parallel: rank 0's store at {address}: {error}") from error


def join(shard: Shard, meeting: Meeting, device: torch.device) -> TorchRanks:
    """Meet the other ranks.

    Raises:
        RankLost: not all ranks came in time.
    """
    try:
        group = _group(shard, meeting, device)
    except RuntimeError as error:  # dist.DistError is one
        seconds = f"{meeting.timeout_s:g} s"
        what = f"rank {shard.rank} of {shard.size} did not meet all others within {seconds}"
        raise RankLost(f"tensor_parallel: {what}: {error}") from error
    return TorchRanks(shard, meeting.num_local, group)


def _group(shard: Shard, meeting: Meeting, device: torch.device) -> Any:
    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL
        return nccl(meeting.store, shard.rank, shard.size, nccl.Options())
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=meeting.host)]
    options._timeout = timedelta(seconds=meeting.timeout_s)
    group = gloo(meeting.store, shard.rank, shard.size, options)
    group._set_default_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    return group
