"""Rank 0's view of the other ranks: starts them, sends them steps, and notices when one ends."""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from loraplex.errors import InvalidRequest
from loraplex_services.worker.adapters.device.loader import CopiedImage
from loraplex_services.worker.runner.parallel.messages import (
    Copy,
    CopyDone,
    Drop,
    Order,
    RankLost,
    RankReady,
    RankRefused,
    RankSocket,
    RankStart,
    Reply,
)
from loraplex_services.worker.runner.parallel.mirror import StepWriter
from loraplex_services.worker.runner.step_inputs import StepInputs
from loraplex_services.worker.types.extents import Extents
from loraplex_services.worker.types.messages import frame

logger = logging.getLogger(__name__)

RANK_MODULE = "loraplex_services.worker.runner.parallel.rank_process"
SOCKET_BUFFER_BYTES = 4 << 20
HANG_UP_S = 5.0
"""Seconds that a rank may take to notice that its socket was closed."""

RankEnded = Callable[[int, int], None]
"""Called from any thread with a rank that has ended, and its exit code."""


class Follower:
    """One other rank: its process, and the thread that reads its replies."""

    def __init__(self, start: RankStart, on_reply: Callable[[int, Reply], None], on_end: RankEnded):
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", RANK_MODULE, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.rank = start.rank
        self.socket = RankSocket(ours)
        self.socket.send(start)
        self._on_reply, self._on_end = on_reply, on_end
        self.reader = threading.Thread(target=self._read, daemon=True, name=f"rank {self.rank}")
        self.reader.start()

    def _read(self) -> None:
        with contextlib.suppress(RankLost):
            while True:
                self._on_reply(self.rank, self.socket.reply())
        self._on_end(self.rank, self.process.wait())

    def close(self) -> None:
        """End the process."""
        self.socket.close()
        try:
            self.process.wait(HANG_UP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Followers:
    """All other ranks of a group."""

    def __init__(
        self,
        num_ranks: int,
        model_dir: Path,
        settings: dict[str, str | int | float | bool],
        timeout_s: float,
        on_end: RankEnded,
    ) -> None:
        """Start them. They load while this rank does."""
        self._folder = Path(tempfile.mkdtemp(prefix="loraplex-ranks-"))
        self.rendezvous = str(self._folder / "rendezvous")
        self.timeout_s = timeout_s
        self._on_end = on_end
        self._is_closing = False
        self._ready: queue.SimpleQueue[tuple[int, RankReady | RankRefused | None]]
        self._ready = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._copies: dict[int, GroupCopy] = {}
        self._last_copy: Future[CopiedImage] | None = None
        self._num_copies = 0
        self._steps = StepWriter()
        self._all = [
            Follower(
                RankStart(rank, num_ranks, self.rendezvous, timeout_s, str(model_dir), settings),
                self._take,
                self._ended,
            )
            for rank in range(1, num_ranks)
        ]

    def await_ready(self, own: RankReady) -> None:
        """Wait until all ranks have loaded, and compare them with this one.

        Raises:
            LoraplexError: a rank refused its part, or is not like this one.
            RankLost: a rank has ended.
        """
        for _ in self._all:
            rank, ready = self._ready.get()
            if ready is None:
                raise RankLost(f"rank {rank} ended before it was ready")
            if isinstance(ready, RankRefused):
                raise ready.error.to_error()
            check_equal(own, ready, rank)
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, step: StepInputs) -> bytes:
        """The message of a step, to be sent when the step begins. Steps are written in the order
        in which they are launched, while their requests are as the plan says."""
        return frame(self._steps.write(step))

    def send(self, message: Order) -> None:
        """Send to all other ranks. Raises RankLost."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send what `write` made. Raises RankLost."""
        for follower in self._all:
            follower.socket.send_frame(data)

    def copy(
        self, path: Path, extents: Extents, step_s: float, own: Future[CopiedImage]
    ) -> Future[CopiedImage]:
        """Have all ranks fill `extents` from their images; `own` is this rank's copy.

        Returns: what ends when the last rank is done, with the error of one if any failed.
        """
        with self._lock:
            self._num_copies += 1
            copy_id = self._num_copies
            copy = self._copies[copy_id] = GroupCopy(1 + len(self._all))
        self._last_copy = copy.result
        self.send(Copy(copy_id, str(path), extents, step_s))
        own.add_done_callback(lambda done: self._own_copied(copy_id, done))
        return copy.result

    def await_copies(self, timeout_s: float) -> None:
        """Return when no copy is in progress, or after `timeout_s`."""
        if self._last_copy is not None:
            wait([self._last_copy], timeout_s)  # ranks copy in order

    def close(self) -> None:
        """End the other ranks."""
        self._is_closing = True
        for follower in self._all:
            follower.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _take(self, rank: int, reply: Reply) -> None:
        """Take a reply in, on the rank's thread."""
        if isinstance(reply, CopyDone):
            error = None if reply.error is None else reply.error.to_error()
            self._copied(reply.copy_id, error)
        else:
            self._ready.put((rank, reply))

    def _ended(self, rank: int, code: int) -> None:
        self._ready.put((rank, None))
        if not self._is_closing:
            logger.error("a rank has ended", extra={"rank": rank, "exit_code": code})
            self._on_end(rank, code)

    def _own_copied(self, copy_id: int, done: Future[CopiedImage]) -> None:
        error = done.exception()
        self._copied(copy_id, error, None if error else done.result())

    def _copied(
        self, copy_id: int, error: BaseException | None, own: CopiedImage | None = None
    ) -> None:
        with self._lock:
            copy = self._copies[copy_id]
            copy.num_left -= 1
            copy.error, copy.own = copy.error or error, copy.own or own
            if copy.num_left:
                return
            del self._copies[copy_id]
        if copy.error is not None:
            self.send(Drop(copy_id))
            copy.result.set_exception(copy.error)
        else:
            assert copy.own is not None, "this rank has copied"
            copy.result.set_result(replace(copy.own, copy_id=copy_id))


@dataclass(slots=True)
class GroupCopy:
    """An adapter that is being copied into the arenas of all ranks."""

    num_left: int
    """Number of ranks whose copies have not ended."""
    result: Future[CopiedImage] = field(default_factory=Future)
    own: CopiedImage | None = None
    """The copy of this rank."""
    error: BaseException | None = None
    """The error of the first rank that failed."""


def check_equal(own: RankReady, other: RankReady, rank: int) -> None:
    """Refuse ranks that would not compute the same base in the same way.

    Raises:
        InvalidRequest: naming the first field in which they differ.
    """
    for name in own.__struct_fields__:
        ours, theirs = getattr(own, name), getattr(other, name)
        if ours != theirs:
            why = f"rank {rank} has {theirs}; all ranks must run one release on the same files"
            raise InvalidRequest.field(f"tensor_parallel:{name}", ours, why)
