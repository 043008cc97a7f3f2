"""A rank that follows rank 0: `python -m loraplex_services.worker.runner.parallel.rank_process`.

It has its part of the base and of every adapter, and does what rank 0 does, in the same order. It
knows neither prompts nor sampling. It ends when rank 0 hangs up.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import torch

from loraplex.errors import LoraplexError
from loraplex_services.common.processes.process import die_with_parent
from loraplex_services.common.processes.stacks import print_stacks_on_signal
from loraplex_services.common.settings.switches import LOG_FORMAT, LOG_LEVEL
from loraplex_services.common.telemetry.log import setup_logging
from loraplex_services.worker.adapters.device.loader import CopiedImage
from loraplex_services.worker.runner.building import build_rank
from loraplex_services.worker.runner.parallel.messages import (
    Copy,
    CopyDone,
    Drop,
    Enter,
    HungUp,
    LogitRows,
    RankLost,
    RankRefused,
    RankSocket,
    RankStart,
    Step,
    Unload,
)
from loraplex_services.worker.runner.parallel.mirror import StepReader
from loraplex_services.worker.runner.runner import Passed, TorchRunner
from loraplex_services.worker.types.messages import WireError
from loraplex_services.worker.types.sharding import Shard

logger = logging.getLogger("loraplex_services.worker.runner.parallel.rank_process")

LAST_WORDS_S = 5.0
"""A rank that has lost another one waits for so many seconds, so that rank 0 ends the group."""


class FollowingRank:
    """Carries out the messages of rank 0."""

    def __init__(self, runner: TorchRunner, rank_zero: RankSocket) -> None:
        self._runner = runner
        self._rank_zero = rank_zero
        self._steps = StepReader()
        self._passed: Passed | None = None
        self._copied: dict[int, CopiedImage] = {}

    def run(self) -> None:
        """Serve until rank 0 closes the connection. Raises RankLost."""
        while True:
            match self._rank_zero.order():
                case Step() as step:
                    self._passed = self._runner.follow(self._steps.read(step))
                case LogitRows(token_rows):
                    assert self._passed is not None, "logits come after a step"
                    rows = torch.from_numpy(np.frombuffer(token_rows, np.int64).copy())
                    self._runner.follow_logits(self._passed, rows)
                case Copy() as copy:
                    self._copy(copy)
                case Drop(copy_id):
                    self._copied.pop(copy_id, None)
                case Enter(slot, copy_id):
                    self._runner.enter_adapter(slot, self._copied.pop(copy_id))
                case Unload(slot):
                    self._runner.unload_adapter(slot)

    def _copy(self, copy: Copy) -> None:
        pending = self._runner.copy_adapter(Path(copy.path), copy.extents, copy.step_s)
        pending.add_done_callback(partial(self._tell, copy.copy_id))

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


def main() -> int:
    """Process entry. The exit code is 0 if rank 0 has gone, 3 if the base was refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to rank 0")
    rank_zero = RankSocket(socket.socket(fileno=parser.parse_args().fd))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    print_stacks_on_signal()
    die_with_parent()
    setup_logging("engine", LOG_LEVEL.read(os.environ), LOG_FORMAT.read(os.environ))
    try:
        start = rank_zero.order()
        assert isinstance(start, RankStart), "the first order is to start"
        return _serve(start, rank_zero)
    except HungUp:
        return 0
    except RankLost as error:
        logger.info("rank ends", extra={"reason": str(error)})
        time.sleep(LAST_WORDS_S)
        return 0


def _serve(start: RankStart, rank_zero: RankSocket) -> int:
    shard = Shard(start.rank, start.num_ranks)
    try:
        runner, ready = build_rank(
            Path(start.model_dir), shard, start.rendezvous, start.timeout_s, start.settings
        )
    except LoraplexError as error:
        rank_zero.send(RankRefused(WireError.of(error)))
        return 3
    rank_zero.send(ready)
    FollowingRank(runner, rank_zero).run()
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)
