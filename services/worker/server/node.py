"""Runs the ranks of a machine that follows the worker's first one."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path

from loraplex.errors import Unavailable
from loraplex_services.common.processes.secret import start_with_secret
from loraplex_services.common.processes.signals import stop_event
from loraplex_services.worker.config import WorkerConfig
from loraplex_services.worker.types.nodes import REFUSED_STATUS, rank_command

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Seconds between looks at the ranks' processes."""
PAUSE_S = 1.0
"""Seconds before the ranks of a group that broke start again."""


async def follow(config: WorkerConfig, model_dir: Path) -> None:
    """Keep the ranks of this machine running until SIGTERM. They end together, and when the first
    machine's engine ends; then they start again and wait for the next engine.

    Raises:
        Unavailable: a rank cannot be part of the group.
    """
    stopping = stop_event()
    while not stopping.is_set():
        ranks = _start(config, model_dir)
        try:
            while not stopping.is_set() and all(rank.poll() is None for rank in ranks):
                await asyncio.sleep(LOOK_S)
        finally:
            statuses = [rank.poll() for rank in ranks]
            _end(ranks)
        if REFUSED_STATUS in statuses:
            raise Unavailable(
                "a tensor-parallel rank was refused; the log above gives the reason",
                reason="ENGINE_DOWN",
            )
        if not stopping.is_set():
            logger.warning("ranks restart", extra={"exit_codes": statuses})
            await asyncio.sleep(PAUSE_S)


def _start(config: WorkerConfig, model_dir: Path) -> list[subprocess.Popen[bytes]]:
    nodes, num_ranks = config.engine.nodes, config.engine.tensor_parallel
    num_local = nodes.num_local(num_ranks)
    first = config.node_rank * num_local
    return [
        start_with_secret(
            rank_command(nodes.master_addr, rank, num_ranks, nodes, str(model_dir)), nodes.token
        )
        for rank in range(first, first + num_local)
    ]


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()
