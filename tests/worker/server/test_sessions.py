"""News on their way to gateways."""

from __future__ import annotations

import pytest

from loraplex.errors import DataLoss, ResourceExhausted, Unavailable
from loraplex_services.worker.server import sessions
from loraplex_services.worker.server.sessions import (
    GatewaySession,
    ServerRequest,
    ServerRequests,
    SessionUpdate,
)
from loraplex_services.worker.types.messages import Failure, TokenOutput, WireError


def add(live: ServerRequests, session: GatewaySession, request_id: str) -> str:
    return live.add(ServerRequest(session, request_id, (), 3, 0.0))


def test_one_step_becomes_one_message_for_each_session() -> None:
    live, one, two = ServerRequests(), GatewaySession(1, "g1"), GatewaySession(2, "g2")
    keys = [add(live, one, "a"), add(live, one, "b"), add(live, two, "a")]
    tokens = [TokenOutput(key, [index], 0) for index, key in enumerate(keys[1:])]
    failures = [Failure(keys[0], WireError.of(DataLoss("damaged")))]
    news = live.sort_out(5, tokens, failures)
    assert [(request_id, out.token_ids) for request_id, out in news[one].tokens] == [("b", [0])]
    assert [request_id for request_id, _ in news[one].failures] == ["a"]
    assert [(request_id, out.token_ids) for request_id, out in news[two].tokens] == [("a", [1])]


def test_a_request_that_has_ended_hears_nothing() -> None:
    live, session = ServerRequests(), GatewaySession(1, "g")
    key = add(live, session, "a")
    live.remove(key)
    assert live.sort_out(1, [TokenOutput(key, [1], 0)], []) == {} and session.live == {}


async def test_queued_news_come_before_the_end() -> None:
    session = GatewaySession(1, "g")
    session.push(SessionUpdate(1))
    session.end(Unavailable("stopping"))
    session.push(SessionUpdate(2))
    assert (await session.next()) == SessionUpdate(1)
    with pytest.raises(Unavailable):
        await session.next()


async def test_a_half_closed_session_ends_with_its_last_request() -> None:
    live, session = ServerRequests(), GatewaySession(1, "g")
    key = add(live, session, "a")
    session.no_more_requests()
    session.push(SessionUpdate(1))
    live.remove(key)
    assert (await session.next()) == SessionUpdate(1)
    assert (await session.next()) is None


async def test_a_reader_too_far_behind_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_UNREAD", 2)
    session = GatewaySession(1, "g")
    for step in range(4):
        session.push(SessionUpdate(step))
    assert [(await session.next()).step for _ in range(2)] == [0, 1]
    with pytest.raises(ResourceExhausted):
        await session.next()
