"""Forms a group of ranks: checks whether a base can be divided, connects the ranks, and waits until
they are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from loraplex.errors import InvalidRequest, LoraplexError, Unsupported
from loraplex_services.worker.layers.ranks import Ranks
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.runner.parallel.base_digests import config_digest, weights_digest
from loraplex_services.worker.runner.parallel.collectives import Meeting, join
from loraplex_services.worker.runner.parallel.followers import Followers
from loraplex_services.worker.runner.parallel.messages import RankLost, RankReady
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.sharding import Shard, check_divisible

LOCAL_TIMEOUT_S = 120.0
"""Seconds within which the ranks of one machine must start and connect, before any of them
loads."""
NODES_TIMEOUT_S = 600.0
"""The same limit for several machines, which may have to fetch the base first."""

BuildPart = Callable[[Ranks], TorchRunner]
"""Builds the part of the base that a rank has."""


def check_group(
    model_dir: Path, model_impl: str, device: torch.device, num_ranks: int, num_local: int
) -> None:
    """Refuse a base or a machine that this many ranks cannot share.

    Args:
        num_local: number of ranks on this machine.

    Raises:
        LoraplexError: naming the field that is wrong.
    """
    if model_impl == "transformers":
        why = "serves a base on one rank only; leave out --tensor-parallel"
        raise Unsupported.field("model_impl", model_impl, why)
    _, config = read_model_config(model_dir)
    check_divisible(config, num_ranks)
    if device.type == "cuda" and num_local > (num_devices := torch.cuda.device_count()):
        why = (
            f"this machine has {num_devices} CUDA devices, and each of {num_local} ranks needs one"
        )
        raise InvalidRequest.field("tensor_parallel", num_ranks, why)


def lead(
    followers: Followers,
    build: BuildPart,
    device: torch.device,
    settings: Mapping[str, Any],
    model_dir: Path,
    timeout_s: float,
) -> TorchRunner:
    """Rank 0 of a group whose other ranks are starting.

    Raises:
        LoraplexError: a rank cannot serve its part, or differs from the others.
        RankLost: a rank ended or came too late.
    """
    try:
        meeting = followers.meet(dict(settings), timeout_s)
        shard = Shard(0, followers.num_ranks)
        runner, ready = join_and_build(build, device, shard, meeting, model_dir)
        followers.await_ready(ready, [layout.fingerprint for layout in runner.layout.ranks])
    except LoraplexError as error:
        followers.refuse(error)
        followers.close()
        raise
    except RankLost as error:
        refusal = followers.refusal()
        followers.close()
        raise refusal or error from None
    except BaseException:
        followers.close()
        raise
    runner.lead(followers)
    return runner


def join_and_build(
    build: BuildPart, device: torch.device, shard: Shard, meeting: Meeting, model_dir: Path
) -> tuple[TorchRunner, RankReady]:
    """Meet the other ranks, then build this one's part. Raises as `join` and `build` do."""
    if device.type == "cuda":
        torch.cuda.set_device(shard.rank % meeting.num_local)
    runner = build(join(shard, meeting, device))
    info = runner.model_info()
    ready = RankReady(
        config=config_digest(model_dir),
        weights=weights_digest(model_dir),
        dtype=info.dtype,
        arithmetic=info.numerics_fingerprint,
        num_blocks=runner.arena_blocks,
        block_bytes=runner.block_bytes,
    )
    return runner, ready
