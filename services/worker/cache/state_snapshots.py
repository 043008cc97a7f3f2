"""Keeps recurrent states after their request has ended, for the prefix cache.

KV can be reused up to any token, but a state only at the token after which it was computed. A
snapshot is the state after some full blocks of a sequence, identified by the prefix hash of the
last one. The step that computes it writes it to its final blocks, so it is never copied. A request
that starts from it reads it and writes to its own blocks.

A snapshot is in use while a request is going to start from it, and idle otherwise. Idle snapshots
count as free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.reclaimer import Offer, reuse_probability

STATE_OWNER = "state snapshots"
"""Owner name of all snapshots in the arena."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after `num_tokens` tokens that its key fixes."""

    key: bytes
    blocks: list[int]
    num_tokens: int
    num_users: int = 0
    idle_since_s: float = 0.0
    last_used: int = -1
    """The step that was planned last when the snapshot became idle."""


class StateSnapshots:
    """Implements `reclaimer.Idle`: the least recently used is evicted first."""

    def __init__(self, arena: Arena, num_blocks: int) -> None:
        """`num_blocks`: of each snapshot; 0 = the base has no recurrent layers."""
        self._arena = arena
        self.num_blocks = num_blocks
        self._by_key: dict[bytes, Snapshot] = {}
        self._idle: OrderedDict[bytes, Snapshot] = OrderedDict()
        self.token_s = 0.0
        """Seconds to compute one token again, as measured recently."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def blocks(self, key: bytes) -> list[int]:
        """Blocks of an existing snapshot."""
        return self._by_key[key].blocks

    def take(self, key: bytes, num_tokens: int, now: float) -> list[int]:
        """Blocks for a new snapshot, which the step planned last writes. The caller has made sure
        that they are free."""
        assert key not in self._by_key, "a snapshot is taken once"
        blocks = self._arena.allocate(STATE_OWNER, self.num_blocks)
        self._by_key[key] = snapshot = Snapshot(key, blocks, num_tokens)
        self._become_idle(snapshot, now)
        return blocks

    def use(self, key: bytes) -> None:
        """Note that one more request is going to start from the snapshot."""
        snapshot = self._by_key[key]
        self._idle.pop(key, None)
        snapshot.num_users += 1

    def give_back(self, key: bytes, now: float) -> None:
        """Note that a request has read the snapshot in the step that was planned last, or will not
        read it."""
        snapshot = self._by_key[key]
        assert snapshot.num_users > 0, "given back more often than used"
        snapshot.num_users -= 1
        if not snapshot.num_users:
            self._become_idle(snapshot, now)

    def _become_idle(self, snapshot: Snapshot, now: float) -> None:
        snapshot.idle_since_s, snapshot.last_used = now, self._arena.last_planned
        self._idle[snapshot.key] = snapshot

    def idle_blocks(self, protected: Collection[str]) -> int:
        """Number of blocks that could be freed. `protected` names adapters, so it protects none of
        them."""
        return len(self._idle) * self.num_blocks

    def offer(self, protected: Collection[str], now: float) -> Offer | None:
        """The next idle snapshot. Without it, all of its tokens may have to be computed again."""
        if not self._idle:
            return None
        oldest = next(iter(self._idle.values()))
        restore_s = oldest.num_tokens * self.token_s
        return Offer(self.num_blocks, restore_s, reuse_probability(now - oldest.idle_since_s))

    def give_up(self, protected: Collection[str], whole_block: bool) -> None:
        """Free the snapshot that `offer` named."""
        _, snapshot = self._idle.popitem(last=False)
        del self._by_key[snapshot.key]
        self._arena.free(STATE_OWNER, snapshot.blocks, snapshot.last_used)

    def check_integrity(self, used: Iterable[bytes]) -> None:
        """Assert that users are the requests with these keys, and that ownership agrees."""
        users = dict.fromkeys(self._by_key, 0)
        for key in used:
            users[key] += 1
        assert users == {key: snapshot.num_users for key, snapshot in self._by_key.items()}
        assert {key for key, count in users.items() if not count} == self._idle.keys()
        blocks = [block for snapshot in self._by_key.values() for block in snapshot.blocks]
        owned = self._arena.blocks_by_owner().get(STATE_OWNER, set())
        assert len(blocks) == len(owned) and set(blocks) == owned, "blocks of snapshots"
