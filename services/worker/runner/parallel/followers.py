"""Rank 0's view of the other ranks: meets them, sends them steps, and notices when one ends."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

import loraplex
from loraplex.errors import LoraplexError
from loraplex_services.common.processes.secret import start_with_secret
from loraplex_services.worker.adapters.device.loader import CopiedImage
from loraplex_services.worker.adapters.pack.image import image_path
from loraplex_services.worker.runner.parallel.collectives import Meeting, open_store
from loraplex_services.worker.runner.parallel.messages import (
    Build,
    Copy,
    CopyDone,
    Drop,
    Join,
    Order,
    RankLost,
    RankReady,
    RankRefused,
    RankSocket,
    RankStart,
    Refuse,
    Reply,
    check_equal,
)
from loraplex_services.worker.runner.parallel.mirror import StepWriter
from loraplex_services.worker.runner.parallel.remote_images import ImageSender
from loraplex_services.worker.runner.parallel.rendezvous import Rendezvous
from loraplex_services.worker.runner.step_inputs import StepInputs
from loraplex_services.worker.types.extents import Extents
from loraplex_services.worker.types.messages import WireError, frame
from loraplex_services.worker.types.nodes import Nodes, rank_command

logger = logging.getLogger(__name__)

HANG_UP_S = 5.0
"""Seconds that a rank may take to notice that its socket was closed."""
REFUSAL_S = 2.0
"""Seconds within which the reason of a broken collective may arrive."""
UNKNOWN_STATUS = 1
"""Stands for the exit status of a rank on another machine."""

RankEnded = Callable[[int, int], None]
"""Called from any thread with a rank that has ended, and its exit code."""


class Follower:
    """One other rank: its connections, and the thread that reads its replies."""

    def __init__(
        self,
        rank: int,
        orders: RankSocket,
        process: subprocess.Popen[bytes] | None,
        on_reply: Callable[[int, Reply], None],
        on_end: RankEnded,
    ) -> None:
        """`process`: the rank's, if it was started here."""
        self.rank = rank
        self.socket = orders
        self.process = process
        self._on_reply, self._on_end = on_reply, on_end
        self.reader = threading.Thread(target=self._read, daemon=True, name=f"rank {rank}")
        self.reader.start()

    def _read(self) -> None:
        with contextlib.suppress(RankLost):
            while True:
                self._on_reply(self.rank, self.socket.reply())
        self._on_end(self.rank, self.process.wait() if self.process else UNKNOWN_STATUS)


class Followers:
    """All other ranks of a group."""

    def __init__(self, num_ranks: int, nodes: Nodes, model_dir: Path, on_end: RankEnded) -> None:
        """Start those of this machine, and wait for connections."""
        self.num_local = nodes.num_local(num_ranks)
        self.num_ranks = num_ranks
        self._build = own_build(num_ranks, nodes)
        self._on_end = on_end
        self._is_closing = False
        self._has_refused = False
        """Whether a rank ends because it has refused its part."""
        self._ready: queue.SimpleQueue[tuple[int, RankReady | RankRefused | None]]
        self._ready = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._copies: dict[int, GroupCopy] = {}
        self._last_copy: Future[CopiedImage] | None = None
        self._num_copies = 0
        self._steps = StepWriter()
        self._all: list[Follower] = []
        self._image_senders: list[ImageSender] = []
        self._fingerprints: Sequence[str] = ()
        token = nodes.token or secrets.token_hex()
        self._rendezvous = Rendezvous(nodes, token)
        arguments = num_ranks, nodes, str(model_dir)
        self._processes = {
            rank: start_with_secret(rank_command(self._rendezvous.address, rank, *arguments), token)
            for rank in range(1, self.num_local)
        }

    def meet(self, settings: dict[str, str | int | float | bool], timeout_s: float) -> Meeting:
        """Wait for all ranks to connect, and let them load.

        Returns:
            Where this rank meets them.

        Raises:
            InvalidRequest: a rank differs from this one.
            RankLost: a rank has ended or came too late.
        """
        await_ranks = partial(
            self._rendezvous.await_ranks,
            build=self._build,
            timeout_s=timeout_s,
            check=self._check_alive,
        )
        found = await_ranks({(rank, False) for rank in range(1, self.num_ranks)})
        for (rank, _), end in found.items():
            process = self._processes.get(rank)
            self._all.append(Follower(rank, end, process, self._take, self._ended))
        # If there are other machines, they have the last ranks, and this is how they reach rank 0.
        host, _ = found[self.num_ranks - 1, False].addresses
        store = open_store(host, timeout_s)
        self.send(RankStart((host, store.port), timeout_s, settings))
        remote = await_ranks({(rank, True) for rank in range(self.num_local, self.num_ranks)})
        for (rank, _), end in remote.items():
            sender = ImageSender(end.detach(), rank, partial(self._image, rank))
            self._image_senders.append(sender)
        self._rendezvous.close()
        return Meeting(host, store, timeout_s, self.num_local)

    def await_ready(self, own: RankReady, fingerprints: Sequence[str]) -> None:
        """Wait until all ranks have loaded, and compare them with this one.

        Args:
            fingerprints: of the layouts for which adapters are packed, by rank.

        Raises:
            LoraplexError: a rank refused its part, or is not like this one.
            RankLost: a rank has ended.
        """
        self._fingerprints = fingerprints
        for _ in self._all:
            rank, ready = self._ready.get()
            if ready is None:
                raise RankLost(f"rank {rank} ended before it was ready")
            if isinstance(ready, RankRefused):
                raise ready.error.to_error()
            check_equal(own, ready, rank)

    def refusal(self) -> LoraplexError | None:
        """Why a rank has refused its part, if this is what broke a collective."""
        with contextlib.suppress(queue.Empty):
            while True:
                _, ready = self._ready.get(timeout=REFUSAL_S)
                if isinstance(ready, RankRefused):
                    return ready.error.to_error()
        return None

    def refuse(self, error: LoraplexError) -> None:
        """Tell the other ranks why the group cannot form. They then end."""
        self._is_closing = True
        with contextlib.suppress(RankLost):
            self.send(Refuse(WireError.of(error)))

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

        Returns: the copy of the group, which is done when the last rank is. If any rank failed, it
            has the error of one of them: as its `failure` if this rank's own copy may still be in
            progress.
        """
        with self._lock:
            self._num_copies += 1
            copy_id = self._num_copies
            copy = self._copies[copy_id] = GroupCopy(path, 1 + len(self._all))
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
        self._rendezvous.close()
        for follower in self._all:
            follower.socket.close()
        for sender in self._image_senders:
            sender.close()
        for process in self._processes.values():
            if not self._all:  # it still waits for the others
                process.kill()
            _end(process)

    def _check_alive(self) -> None:
        """Raises RankLost if a process has ended."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                raise RankLost(f"rank {rank} ended with exit code {code} before it had joined")

    def _image(self, rank: int, copy_id: int) -> Path | None:
        """The image of a rank of another machine that it may read now. From any thread."""
        with self._lock:
            copy = self._copies.get(copy_id)
        return None if copy is None else image_path(copy.path, self._fingerprints[rank])

    def _take(self, rank: int, reply: Reply) -> None:
        """Process a reply, on the rank's thread."""
        if isinstance(reply, CopyDone):
            error = None if reply.error is None else reply.error.to_error()
            self._copied(reply.copy_id, error)
        elif not isinstance(reply, Join):
            self._has_refused |= isinstance(reply, RankRefused)
            self._ready.put((rank, reply))

    def _ended(self, rank: int, code: int) -> None:
        self._ready.put((rank, None))
        if not (self._is_closing or self._has_refused):
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
        if copy.own is not None:
            copy.result.set_result(replace(copy.own, copy_id=copy_id, failure=copy.error))
        else:
            self.send(Drop(copy_id))
            copy.result.set_exception(copy.error)


@dataclass(slots=True)
class GroupCopy:
    """An adapter that is being copied into the arenas of all ranks."""

    path: Path
    num_left: int
    """Number of ranks whose copies have not ended."""
    result: Future[CopiedImage] = field(default_factory=Future)
    own: CopiedImage | None = None
    """The copy of this rank."""
    error: BaseException | None = None
    """The error of the first rank that failed."""


def own_build(num_ranks: int, nodes: Nodes) -> Build:
    """The properties that must be the same on all ranks."""
    return Build(loraplex.__version__, str(torch.__version__), num_ranks, nodes.count)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process of a rank whose connection is closed."""
    try:
        process.wait(HANG_UP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
