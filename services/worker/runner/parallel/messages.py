"""Messages between rank 0 and the other ranks, as frames of msgpack over TCP.

    rank -> rank 0   Join, as soon as each end has proved that it knows the group's secret
    rank 0 -> rank   RankStart or Refuse, then what to do, in the order in which rank 0 does it
    rank -> rank 0   RankReady or RankRefused, then CopyDone for each Copy

They contain ids and positions. Activations are exchanged by collectives, and images of adapters
over connections of their own.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque

import msgspec

from loraplex.errors import InvalidRequest
from loraplex_services.worker.types.extents import Extents
from loraplex_services.worker.types.messages import FrameBuffer, WireError, frame

RECEIVE_BYTES = 1 << 20
MAPPED_IPV4 = "::ffff:"
"""The prefix that an IPv6 socket puts before the IPv4 addresses of its peers."""


class RankLost(Exception):
    """Another rank has ended or cannot be reached: this one cannot continue."""


class PeerClosed(RankLost):
    """The other end closed its socket, as rank 0 does to end a rank."""


class Build(msgspec.Struct, frozen=True):
    """The properties that must be equal on all ranks before any of them loads."""

    release: str
    """Release of this package."""
    torch_version: str
    tensor_parallel: int
    """Number of ranks."""
    nnodes: int
    """Number of machines."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A rank has connected, and names itself."""

    rank: int
    build: Build
    is_for_images: bool = False
    """Whether this is the connection over which a rank of another machine reads images."""


class RankStart(msgspec.Struct, frozen=True, tag="start"):
    """All ranks have joined: load."""

    store: tuple[str, int]
    """Address of the store with which the collectives connect."""
    timeout_s: float
    """Seconds to connect them."""
    settings: dict[str, str | int | float | bool]
    """Arguments of `build_runner`, the same on every rank."""


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """The rank cannot be part of this group."""

    error: WireError


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """The rank has its part of the base. Every field must be equal on all ranks."""

    config: str
    """Digest of config.json."""
    weights: str
    """Digest of the weights' files; see `base_digests`."""
    dtype: str
    arithmetic: str
    num_blocks: int
    block_bytes: int


class RankRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The rank cannot serve its part."""

    error: WireError


def check_equal(own: Build | RankReady, other: Build | RankReady, rank: int) -> None:
    """Raises InvalidRequest naming the first field in which another rank differs from rank 0."""
    for name in own.__struct_fields__:
        ours, theirs = getattr(own, name), getattr(other, name)
        if ours != theirs:
            why = f"rank {rank} has {theirs}; all ranks must have the same"
            raise InvalidRequest.field(f"tensor_parallel:{name}", ours, why)


class RowMessage(msgspec.Struct, frozen=True, array_like=True):
    """One request in a step."""

    key: int
    """Identifies the request for as long as the other ranks know it."""
    num_prompt: int
    """Number of prompt tokens; 0 = unchanged."""
    start: int
    num_tokens: int
    tables: list[tuple[int, list[int]]]
    """For each KV group, the first entry of the block table that has changed, and the entries from
    there on."""
    states: list[tuple[int, list[int] | None, list[int]]] = []
    """The spans of a base with recurrent layers: number of tokens, and the blocks with the state
    before and after. None = the state is advanced where it is."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Compute one forward pass."""

    rows: list[RowMessage]
    gone: list[int]
    """Keys of requests that will not occur again."""
    runs: list[tuple[int, float, int, int]]
    """Slot, coefficient, and token rows [begin, end) of each run."""
    token_ids: bytes
    rope_rows: bytes | None
    follows: bytes
    """See `StepInputs`; int64."""
    read_rows: bytes | None
    """See `StepInputs`; int64. Other ranks do not know what requests ask for."""


class LogitRows(msgspec.Struct, frozen=True, tag="logits"):
    """Give rank 0 this rank's logits of some token rows of the last step."""

    token_rows: bytes
    """int64, ascending."""


class BestTokens(msgspec.Struct, frozen=True, tag="best"):
    """Give rank 0 the best token of this rank for some token rows of the last step."""

    token_rows: bytes
    """int64 `[n]`, ascending."""
    drawn: bytes
    """int64: which of these rows have a temperature, ascending; the others take the best logit."""
    temperatures: bytes
    """float32: see `sampling.drawing.RowDraws`."""
    keys: bytes
    """int64: see there."""


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """Fill extents from the rank's own image in a folder."""

    copy_id: int
    path: str
    extents: Extents
    step_s: float


class CopyDone(msgspec.Struct, frozen=True, tag="copied"):
    """A copy has ended."""

    copy_id: int
    error: WireError | None = None


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Forget a copy, because another rank could not copy or rank 0 not enter the adapter."""

    copy_id: int


class Enter(msgspec.Struct, frozen=True, tag="enter"):
    """Let steps use what was copied."""

    slot: int
    copy_id: int


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """Take a slot out of the tables."""

    slot: int


Order = RankStart | Refuse | Step | LogitRows | BestTokens | Copy | Drop | Enter | Unload
"""A message to a rank."""
Reply = Join | RankReady | RankRefused | CopyDone
"""A message from a rank."""

_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def close_socket(end: socket.socket) -> None:
    """Close a socket. A thread that waits for it would keep it open."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


class RankSocket:
    """One end of a connection between rank 0 and another rank; blocking."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = FrameBuffer()
        self._bodies: deque[bytes] = deque()
        self._sending = threading.Lock()

    def send(self, message: Order | Reply) -> None:
        """Write one message. From any thread. Raises RankLost."""
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Write a message that is encoded already."""
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise RankLost("the socket to another rank is closed") from error

    def order(self) -> Order:
        """Wait for the next order. Raises RankLost."""
        return _orders.decode(self._next())

    def reply(self) -> Reply:
        """Wait for the next reply. Raises RankLost."""
        return _replies.decode(self._next())

    def detach(self) -> socket.socket:
        """The socket, of which nothing more has been read than messages."""
        assert not self._bodies, "messages that nobody has read"
        return self._socket

    def fileno(self) -> int:
        """The socket's number, to wait for its end."""
        return self._socket.fileno()

    @property
    def addresses(self) -> tuple[str, str]:
        """Addresses of this end and of the other end, without ports."""
        own, other = self._socket.getsockname()[0], self._socket.getpeername()[0]
        return own.removeprefix(MAPPED_IPV4), other.removeprefix(MAPPED_IPV4)

    def close(self) -> None:
        """Close the socket."""
        close_socket(self._socket)

    def _next(self) -> bytes:
        while not self._bodies:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except OSError as error:
                raise RankLost("the socket to another rank broke") from error
            if not data:
                raise PeerClosed("another rank closed its socket")
            self._bodies += self._frames.feed(data)
        return self._bodies.popleft()
