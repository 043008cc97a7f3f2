"""Who becomes part of a group of ranks, and who is turned away."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest

from loraplex.errors import InvalidRequest, Unauthenticated
from loraplex_services.worker.runner.parallel import rendezvous as under_test
from loraplex_services.worker.runner.parallel.messages import (
    Build,
    Join,
    RankLost,
    RankSocket,
    Refuse,
)
from loraplex_services.worker.runner.parallel.rendezvous import (
    NONCE_BYTES,
    PROOF_BYTES,
    Rendezvous,
    connect,
    host_and_port,
    receive,
)
from loraplex_services.worker.types.nodes import Nodes
from tests.servers import free_address, free_port

BUILD = Build(release="1.0", torch_version="2.0", tensor_parallel=2, nnodes=1)
PATIENCE_S = 30.0


@pytest.fixture
def meeting() -> Iterator[Rendezvous]:
    meeting = Rendezvous(Nodes(), "new-secret\nold-secret")
    yield meeting
    meeting.close()


def await_rank(meeting: Rendezvous, timeout_s: float = PATIENCE_S):
    return meeting.await_ranks({(1, False)}, BUILD, timeout_s, lambda: None)


def is_closed(end: RankSocket) -> bool:
    """Whether rank 0 has hung up."""
    raw = end.detach()
    raw.settimeout(0.05)
    try:
        return raw.recv(1) == b""
    except TimeoutError:
        return False


@pytest.mark.parametrize("secret", ["new-secret", "old-secret", "old-secret\nnewest-secret"])
def test_a_rank_that_knows_a_secret_joins(meeting, secret):
    rank = connect(meeting.address, secret, Join(1, BUILD), PATIENCE_S)
    found = await_rank(meeting)
    assert found[1, False].addresses == rank.addresses == ("127.0.0.1", "127.0.0.1")


def test_a_rank_with_another_secret_is_refused_and_the_group_still_forms(meeting):
    with pytest.raises(Unauthenticated, match="LORAPLEX_SERVICE_TOKEN_FILE"):
        connect(meeting.address, "guessed", Join(1, BUILD), PATIENCE_S)
    connect(meeting.address, "new-secret", Join(1, BUILD), PATIENCE_S)
    assert await_rank(meeting)


def test_a_rank_refuses_a_rank_0_that_only_repeats_what_it_hears():
    """It answers with the rank's own proof."""

    def imitate(listener: socket.socket) -> None:
        end, _ = listener.accept()
        with end:
            end.sendall(bytes(NONCE_BYTES))
            end.sendall(receive(end, NONCE_BYTES + PROOF_BYTES)[NONCE_BYTES:])

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        done = pool.submit(imitate, listener)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(Unauthenticated):
            connect(address, "new-secret", Join(1, BUILD), PATIENCE_S)
        done.result()


def test_silence_garbage_and_half_a_proof_keep_nobody_out(meeting, monkeypatch):
    monkeypatch.setattr(under_test, "HANDSHAKE_S", 0.2)
    with ExitStack() as open_ends:
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(NONCE_BYTES + 5), bytes(1 << 16)) * 20:
            end = open_ends.enter_context(
                socket.create_connection(host_and_port(meeting.address), PATIENCE_S)
            )
            end.sendall(sent)
        monkeypatch.undo()
        connect(meeting.address, "new-secret", Join(1, BUILD), PATIENCE_S)
        assert await_rank(meeting)


@pytest.mark.parametrize("name", BUILD.__struct_fields__)
def test_a_rank_of_another_build_is_refused_on_both_ends_by_the_field(meeting, name):
    other = 9 if isinstance(getattr(BUILD, name), int) else "other"
    theirs = msgspec.structs.replace(BUILD, **{name: other})
    rank = connect(meeting.address, "new-secret", Join(1, theirs), PATIENCE_S)
    with pytest.raises(InvalidRequest, match=f"rank 1 has {other}") as caught:
        await_rank(meeting)
    [violation] = caught.value.violations
    assert violation.field == f"tensor_parallel:{name}"
    assert violation.value == str(getattr(BUILD, name))
    told = rank.order()
    assert isinstance(told, Refuse) and told.error.message == caught.value.message


def test_a_rank_that_is_none_of_the_group_is_refused(meeting):
    connect(meeting.address, "new-secret", Join(7, BUILD), PATIENCE_S)
    with pytest.raises(InvalidRequest, match="tensor_parallel:rank"):
        await_rank(meeting)


def test_the_last_connection_of_a_rank_counts(meeting):
    """An earlier one may be that of a machine that was lost."""
    ends = [connect(meeting.address, "new-secret", Join(1, BUILD), PATIENCE_S)]

    def comes_again() -> None:
        """And once rank 0 has hung up on one of the two, the last rank comes."""
        if len(ends) == 1:
            ends.append(connect(meeting.address, "new-secret", Join(1, BUILD), PATIENCE_S))
        elif len(ends) == 2 and any(map(is_closed, ends)):
            ends.append(connect(meeting.address, "new-secret", Join(2, BUILD), PATIENCE_S))

    channels = {(1, False), (2, False)}
    assert set(meeting.await_ranks(channels, BUILD, PATIENCE_S, comes_again)) == channels


def test_ranks_that_do_not_come_are_named(meeting):
    with pytest.raises(RankLost, match=r"no connection of ranks 1 within 0\.1 s"):
        await_rank(meeting, 0.1)


def test_a_rank_without_rank_0_names_the_address():
    address = free_address()
    with pytest.raises(RankLost, match=f"rank 1 has not reached rank 0 at {re.escape(address)}"):
        connect(address, "new-secret", Join(1, BUILD), 0.1)


def test_nobody_can_connect_once_the_group_has_formed(meeting):
    connect(meeting.address, "new-secret", Join(1, BUILD), PATIENCE_S)
    await_rank(meeting)
    meeting.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(host_and_port(meeting.address), PATIENCE_S)


def test_an_address_of_another_machine_is_refused_as_the_setting():
    with pytest.raises(InvalidRequest, match="cannot listen") as caught:
        Rendezvous(Nodes(2, "192.0.2.1:1", "secret"), "secret")
    assert caught.value.violations[0].field == "master_addr"


def test_a_name_listens_on_all_interfaces_and_is_reached_on_loopback():
    port = free_port()
    meeting = Rendezvous(Nodes(2, f"worker-0.example:{port}", "secret"), "secret")
    try:
        connect(meeting.address, "secret", Join(1, BUILD), PATIENCE_S)
        assert await_rank(meeting)[1, False].addresses == ("127.0.0.1", "127.0.0.1")
    finally:
        meeting.close()
