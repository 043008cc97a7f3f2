"""How peers are named and wrong keys counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loraplex.errors import ResourceExhausted
from loraplex_services.common.limits import MAX_WRONG_KEYS_PER_PEER, WRONG_KEYS_PER_S
from loraplex_services.common.security.wrong_keys import (
    MAX_PEERS,
    WrongKeys,
    current_peer,
    peer_of_grpc,
    peer_of_host,
)

pytestmark = pytest.mark.hostile


@pytest.fixture(autouse=True)
def no_peer() -> Iterator[None]:
    """Nothing of a test's peer is left for the next one."""
    yield
    current_peer.set("")


@pytest.mark.parametrize(
    ("shown", "peer"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("ipv6:%5B2001:db8::1:2%5D:4711", "2001:db8::/64"),
        ("ipv6:[::ffff:192.0.2.1]:80", "192.0.2.1"),
        ("unix:", ""),
        ("unix:/tmp/socket", ""),
    ],
)
def test_a_peer_is_an_address_or_the_network_of_one(shown: str, peer: str) -> None:
    assert peer_of_grpc(shown) == peer


def test_a_peer_may_try_again_when_it_has_waited() -> None:
    now_s = 0.0
    wrong = WrongKeys(lambda: now_s)
    current_peer.set("192.0.2.1")
    for _ in range(int(MAX_WRONG_KEYS_PER_PEER)):
        wrong.check()
        wrong.count()
    with pytest.raises(ResourceExhausted, match=r"from 192\.0\.2\.1") as caught:
        wrong.check()
    assert caught.value.retry_after_s is not None
    now_s += 1.0 / WRONG_KEYS_PER_S
    wrong.check()
    wrong.count()
    with pytest.raises(ResourceExhausted):
        wrong.check()


def test_the_table_of_peers_is_bounded() -> None:
    wrong = WrongKeys(lambda: 0.0)
    for n in range(MAX_PEERS + 100):
        current_peer.set(peer_of_host(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}"))
        wrong.count()
    assert len(wrong._peers) == MAX_PEERS
