"""A rank that follows rank 0: `python -m loraplex_services.worker.runner.parallel.rank_process`.

It has its part of the base and of every adapter, and does what rank 0 does, in the same order. It
knows no prompts. It ends when rank 0 closes the connection. Ranks of rank 0's machine are started
by `Followers`, those of other machines by `server.node`.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import socket
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from loraplex.errors import LoraplexError
from loraplex_services.common.processes.process import begin_child
from loraplex_services.common.processes.secret import read_secret
from loraplex_services.worker.adapters.device.loader import CopiedImage
from loraplex_services.worker.runner.building import build_rank
from loraplex_services.worker.runner.parallel.collectives import Meeting, reach_store
from loraplex_services.worker.runner.parallel.followers import own_build
from loraplex_services.worker.runner.parallel.group import LOCAL_TIMEOUT_S, NODES_TIMEOUT_S
from loraplex_services.worker.runner.parallel.messages import (
    BestTokens,
    Copy,
    CopyDone,
    Drop,
    Enter,
    Join,
    LogitRows,
    PeerClosed,
    RankLost,
    RankRefused,
    RankSocket,
    RankStart,
    Refuse,
    Step,
    Unload,
)
from loraplex_services.worker.runner.parallel.mirror import StepReader
from loraplex_services.worker.runner.parallel.remote_images import RemoteBytes
from loraplex_services.worker.runner.parallel.rendezvous import LOOPBACK, connect
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.step_results import ForwardOutput
from loraplex_services.worker.sampling.best_columns import BestRows
from loraplex_services.worker.sampling.drawing import RowDraws
from loraplex_services.worker.types.messages import WireError
from loraplex_services.worker.types.nodes import REFUSED_STATUS, Nodes
from loraplex_services.worker.types.sharding import Shard

logger = logging.getLogger("loraplex_services.worker.runner.parallel.rank_process")

LAST_WORDS_S = 5.0
"""Seconds that a rank waits after it has lost another one, so that rank 0 ends the group."""


class FollowingRank:
    """Carries out the messages of rank 0."""

    def __init__(
        self, runner: TorchRunner, rank_zero: RankSocket, images: socket.socket | None
    ) -> None:
        """`images`: where images are read, if rank 0 is on another machine."""
        self._runner = runner
        self._rank_zero = rank_zero
        self._images = images
        self._steps = StepReader()
        self._output: ForwardOutput | None = None
        self._copied: dict[int, CopiedImage] = {}

    def run(self) -> None:
        """Serve until rank 0 closes the connection. Raises RankLost."""
        while True:
            match self._rank_zero.order():
                case Step() as step:
                    self._output = self._runner.follow(self._steps.read(step))
                case LogitRows(token_rows):
                    assert self._output is not None, "logits come after a step"
                    self._runner.follow_logits(self._output, _int64s(token_rows))
                case BestTokens() as best:
                    assert self._output is not None, "tokens come after a step"
                    rows = _int64s(best.token_rows)
                    self._runner.follow_best(self._output, rows, _best_rows(best))
                case Copy() as copy:
                    self._copy(copy)
                case Drop(copy_id):
                    self._drop(copy_id)
                case Refuse(error):
                    raise error.to_error()
                case Enter(slot, copy_id):
                    self._runner.enter_adapter(slot, self._copied.pop(copy_id))
                case Unload(slot):
                    self._runner.unload_adapter(slot)

    def _copy(self, copy: Copy) -> None:
        content = None if self._images is None else RemoteBytes(self._images, copy.copy_id)
        pending = self._runner.copy_adapter(Path(copy.path), copy.extents, copy.step_s, content)
        pending.add_done_callback(partial(self._tell, copy.copy_id))

    def _drop(self, copy_id: int) -> None:
        copied = self._copied.pop(copy_id, None)
        if copied is not None and copied.copy_events is not None:
            copied.copy_events.wait_all()  # steps may write to its blocks from now on

    def _tell(self, copy_id: int, pending: Future[CopiedImage]) -> None:
        """Report the end of a copy, on the thread that copied."""
        error = pending.exception()
        if error is None:
            self._copied[copy_id] = pending.result()
            self._rank_zero.send(CopyDone(copy_id))
            return
        if not isinstance(error, LoraplexError):
            logger.error("adapter load failed", exc_info=error)
            error = LoraplexError("an adapter could not be loaded", reason="ADAPTER_LOAD_FAILED")
        self._rank_zero.send(CopyDone(copy_id, WireError.of(error)))


def _int64s(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.int64).copy())


def _best_rows(best: BestTokens) -> BestRows:
    temperatures = np.frombuffer(best.temperatures, np.float32)
    keys = np.frombuffer(best.keys, np.int64).reshape(-1, 3)
    return BestRows(np.frombuffer(best.drawn, np.int64), RowDraws(temperatures, keys))


def main() -> int:
    """Process entry. The exit code is 0 if rank 0 has gone, REFUSED_STATUS if the rank cannot be
    part of the group."""
    arguments = _arguments()
    begin_child("engine")
    try:
        return _serve(arguments, read_secret())
    except LoraplexError as error:
        logger.error("a rank was refused", extra={"rank": arguments.rank, "reason": error.message})
        return REFUSED_STATUS
    except PeerClosed:
        return 0
    except RankLost as error:
        logger.info("rank ends", extra={"reason": str(error)})
        time.sleep(LAST_WORDS_S)
        return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--rank", "--num-ranks", "--nnodes"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master-addr", required=True, help="HOST:PORT of rank 0")
    parser.add_argument("--model-dir", type=Path, required=True)
    return parser.parse_args()


def _serve(arguments: argparse.Namespace, token: str) -> int:
    nodes = Nodes(arguments.nnodes)
    shard = Shard(arguments.rank, arguments.num_ranks)
    num_local = nodes.num_local(shard.size)
    is_remote = shard.rank >= num_local
    join = Join(shard.rank, own_build(shard.size, nodes))
    timeout_s = NODES_TIMEOUT_S if is_remote else LOCAL_TIMEOUT_S
    rank_zero = connect(arguments.master_addr, token, join, timeout_s)
    match rank_zero.order():
        case RankStart() as start:
            pass
        case Refuse(error):
            raise error.to_error()
        case order:
            raise AssertionError(f"{type(order).__name__} is not the first order")
    _end_with(rank_zero)
    images = None
    if is_remote:
        join = msgspec.structs.replace(join, is_for_images=True)
        images = connect(arguments.master_addr, token, join, start.timeout_s).detach()
    own, _ = rank_zero.addresses
    host = start.store[0] if own == LOOPBACK else own
    store = reach_store(start.store, start.timeout_s)
    meeting = Meeting(host, store, start.timeout_s, num_local)
    try:
        runner, ready = build_rank(arguments.model_dir, shard, meeting, start.settings)
    except LoraplexError as error:
        rank_zero.send(RankRefused(WireError.of(error)))
        raise
    rank_zero.send(ready)
    FollowingRank(runner, rank_zero, images).run()
    return 0


def _end_with(rank_zero: RankSocket) -> None:
    """End this process when the connection to rank 0 does, even if it waits in a collective."""

    def watch() -> None:
        poll = select.poll()
        poll.register(rank_zero.fileno(), select.POLLRDHUP)
        poll.poll()
        time.sleep(LAST_WORDS_S)  # the last messages may give the reason
        os._exit(0)

    if hasattr(select, "POLLRDHUP"):  # Linux
        threading.Thread(target=watch, daemon=True, name="watch rank 0").start()


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)
