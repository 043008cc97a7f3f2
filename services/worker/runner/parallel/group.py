"""Forms a group of ranks: checks whether a base can be divided, connects the ranks, and waits until
they are ready.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import loraplex
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.layers.ranks import Ranks
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.runner.parallel.collectives import join
from loraplex_services.worker.runner.parallel.followers import Followers
from loraplex_services.worker.runner.parallel.messages import RankReady
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.sharding import Shard, check_divisible

RENDEZVOUS_TIMEOUT_S = 120.0
"""Seconds within which all ranks must start and connect, before any of them loads."""

BuildPart = Callable[[Ranks], TorchRunner]
"""Builds the part of the base that a rank has."""


def check_group(model_dir: Path, model_impl: str, device: torch.device, num_ranks: int) -> None:
    """Refuse a base or a machine that this many ranks cannot share.

    Raises:
        LoraplexError: naming the field that is wrong.
    """
    if model_impl == "transformers":
        why = "serves a base on one rank only; leave out --tensor-parallel"
        raise Unsupported.field("model_impl", model_impl, why)
    _, config = read_model_config(model_dir)
    check_divisible(config, num_ranks)
    if device.type == "cuda" and num_ranks > (num_devices := torch.cuda.device_count()):
        why = f"this machine has {num_devices} CUDA devices, and each rank needs its own"
        raise InvalidRequest.field("tensor_parallel", num_ranks, why)


def lead(
    followers: Followers, build: BuildPart, device: torch.device, num_ranks: int
) -> TorchRunner:
    """Rank 0 of a group whose other ranks are starting.

    Raises:
        LoraplexError: a rank cannot serve its part, or differs from the others.
        RankLost: a rank ended or came too late.
    """
    meeting = followers.rendezvous, followers.timeout_s
    try:
        runner, ready = join_and_build(build, device, Shard(0, num_ranks), *meeting)
        followers.await_ready(ready)
    except BaseException:
        followers.close()
        raise
    runner.lead(followers)
    return runner


def join_and_build(
    build: BuildPart, device: torch.device, shard: Shard, rendezvous: str, timeout_s: float
) -> tuple[TorchRunner, RankReady]:
    """Meet the other ranks, then build this one's part. Raises as `join` and `build` do."""
    if device.type == "cuda":
        torch.cuda.set_device(shard.rank)
    runner = build(join(shard, rendezvous, device, timeout_s))
    info = runner.model_info()
    ready = RankReady(
        torch_version=str(torch.__version__),
        release=loraplex.__version__,
        base=runner.layout.base_key,
        dtype=info.dtype,
        arithmetic=info.numerics_fingerprint,
        num_blocks=runner.arena_blocks,
        block_bytes=runner.block_bytes,
    )
    return runner, ready
