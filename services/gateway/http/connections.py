"""HTTP connections that wait for a request, limited in number and time.

uvicorn keeps a connection until its first request is complete, however long that takes.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from loraplex_services.common.limits import MAX_HTTP_CONNECTIONS, MAX_HTTP_HEADER_S


class TimedProtocol(H11Protocol):
    """Closes a connection that has not sent the whole head of a request after `MAX_HTTP_HEADER_S`.

    Between two requests the time-out of idle connections applies, and this one as soon as the head
    of the next request begins to arrive.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects. Closes at once if there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > MAX_HTTP_CONNECTIONS:
            transport.close()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body."""
        super().data_received(data)
        if self._awaits_head:
            self._start_timer()
        else:
            self._stop_timer()

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_timer(self) -> None:
        """Once for each head: bytes that trickle in do not start it again."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(MAX_HTTP_HEADER_S, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self._awaits_head and not self.transport.is_closing():
            self.transport.close()
