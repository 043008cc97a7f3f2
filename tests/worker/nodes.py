"""A second machine of a group of ranks: processes here that reach rank 0 over TCP only."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from loraplex_services.common.processes.secret import start_with_secret
from loraplex_services.worker.types.nodes import Nodes, rank_command
from tests.servers import free_port

TOKEN = "secret-of-the-group"


@contextlib.contextmanager
def other_node(
    num_ranks: int, model_dir: Path, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[tuple[Nodes, list[subprocess.Popen[bytes]]]]:
    """The last half of the ranks, which wait for rank 0.

    Args:
        host: address of this machine, as the other one reaches it.
        prefix: what runs a command on the other machine.
    """
    port = free_port()
    nodes = Nodes(2, f"{host}:{port}", TOKEN)
    arguments = num_ranks, nodes, str(model_dir)
    ranks = [
        start_with_secret([*prefix, *rank_command(nodes.master_addr, rank, *arguments)], TOKEN)
        for rank in range(num_ranks // 2, num_ranks)
    ]
    try:
        yield nodes, ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
