"""Where the tensor-parallel ranks of one worker run, and how a rank is started."""

from __future__ import annotations

import sys

import msgspec

RANK_MODULE = "loraplex_services.worker.runner.parallel.rank_process"
REFUSED_STATUS = 3
"""Exit status of a rank that cannot be part of its group: trying again would not help."""


class Nodes(msgspec.Struct, frozen=True):
    """The machines of a group of ranks. Each has equally many ranks, and the first has rank 0."""

    count: int = 1
    master_addr: str = ""
    """`HOST:PORT`: rank 0 listens on this port while a group forms, and the other machines reach it
    there. "" = a free port of the loopback interface, for a group on one machine."""
    token: str = ""
    """Secrets that prove a rank to rank 0 and rank 0 to a rank, one per line: the first is used,
    all are accepted. "" = one is made for the group."""

    def num_local(self, num_ranks: int) -> int:
        """Number of ranks on each machine."""
        return num_ranks // self.count


ONE_NODE = Nodes()


def rank_command(
    address: str, rank: int, num_ranks: int, nodes: Nodes, model_dir: str
) -> list[str]:
    """The command of a rank, which reads its secret from standard input.

    Args:
        address: `HOST:PORT` of rank 0.
    """
    options = {
        "--rank": rank,
        "--num-ranks": num_ranks,
        "--nnodes": nodes.count,
        "--master-addr": address,
        "--model-dir": model_dir,
    }
    texts = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", RANK_MODULE, *texts]
