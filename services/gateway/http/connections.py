"""Limits HTTP connections: their number, the size of heads, the time that they wait for a request
or a reader, and how finely a body may be cut.

uvicorn keeps a connection until its first request is complete, however long that takes.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from h11._readers import ChunkedReader  # the public parser has no limit for these headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from loraplex_services.common.limits import (
    MAX_HTTP_CONNECTIONS,
    MAX_HTTP_HEAD_BYTES,
    MAX_HTTP_HEADER_S,
    MAX_HTTP_LINES,
    MAX_HTTP_UNREAD_S,
    MAX_SMALL_HTTP_CHUNKS,
    MIN_HTTP_CHUNK_BYTES,
    MIN_HTTP_READ_BYTES,
)

_END_OF_HEAD = re.compile(rb"\n\r?\n")


class _Chunks(ChunkedReader):
    """Reads the chunks of a body. Refuses headers after the last one, which nobody here reads: each
    takes h11 10 microseconds, and it would parse 50,000 of them at once."""

    def __call__(self, buf: Any) -> Any:
        """An event from what has arrived. Raises RemoteProtocolError."""
        if self._reading_trailer and not b"\r\n".startswith(bytes(buf)[:2]):
            raise h11.RemoteProtocolError("headers after the body are not accepted")
        return super().__call__(buf)


class _Parser(h11.Connection):
    """Refuses what keeps the event loop busy at little cost: a large head of many short lines, a
    body in too many small chunks, and headers after a body."""

    _num_small_chunks = 0

    def _get_io_object(self, *args: Any) -> Any:
        reader = super()._get_io_object(*args)
        return _Chunks() if isinstance(reader, ChunkedReader) else reader

    def next_event(self) -> Any:
        """Raises RemoteProtocolError, as for anything else that is not a proper request."""
        if self.their_state is h11.IDLE:
            self._check_head()
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_small_chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._num_small_chunks += len(event.data) < MIN_HTTP_CHUNK_BYTES
            if self._num_small_chunks > MAX_SMALL_HTTP_CHUNKS:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        return event

    def _check_head(self) -> None:
        """h11 itself limits only the size, and only of a head that is not complete."""
        received, _ = self.trailing_data
        end = _END_OF_HEAD.search(received)
        num_bytes = len(received) if end is None else end.end()
        if num_bytes > MAX_HTTP_HEAD_BYTES or received.count(b"\n", 0, num_bytes) > MAX_HTTP_LINES:
            raise h11.RemoteProtocolError("the head of the request is too large")


class TimedProtocol(H11Protocol):
    """Closes a connection that has not sent the whole head of a request after `MAX_HTTP_HEADER_S`.

    Between two requests the time-out of idle connections applies, and this one as soon as the head
    of the next request begins to arrive.

    A connection whose client does not read its answer is closed as well: what was not read stays
    in memory.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _num_unread = 0

    def __init__(self, *args: Any, **fields: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **fields)
        self.conn = _Parser(h11.SERVER, MAX_HTTP_HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects. Closes the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_HTTP_CONNECTIONS:
            transport.close()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_timer()
        self._stop_reader_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body."""
        super().data_received(data)
        if self._awaits_head:
            self._start_timer()
        else:
            self._stop_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not a proper request. Closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # an answer has begun
            self.transport.close()

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer comes."""
        super().pause_writing()
        self._start_reader_timer()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stop_reader_timer()
        super().resume_writing()

    def _should_upgrade(self) -> bool:
        """Never: another protocol would have none of these limits. uvicorn would log a warning for
        each request that offers one, as some clients do with all of theirs."""
        return False

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_timer(self) -> None:
        """Start the timer, once for each head: further bytes of the head do not start it again."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(MAX_HTTP_HEADER_S, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_reader_timer(self) -> None:
        self._num_unread = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(MAX_HTTP_UNREAD_S, self._look_at_reader)

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _look_at_reader(self) -> None:
        if self._num_unread - self.transport.get_write_buffer_size() < MIN_HTTP_READ_BYTES:
            self.transport.abort()
        else:
            self._start_reader_timer()

    def _give_up(self) -> None:
        self._head_timer = None
        if self._awaits_head and not self.transport.is_closing():
            self.transport.close()
