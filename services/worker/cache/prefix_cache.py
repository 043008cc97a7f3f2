"""Keeps KV blocks after their request has ended, so that tokens are not computed twice.

A full block is known by its KV group and the hash of everything that decides its content:

    key_0 = H(root, tokens of block 0),  key_i = H(key_(i-1), tokens of block i)
    root  = H(base, KV format, rope variant, adapter set, tenant, salt)

so that tenants, adapter sets and salts never share blocks with each other. An activated LoRA enters
the hash chain where it is invoked; the blocks before that position are those of the base. In the
same way, a request that follows its tag may keep blocks that earlier adapters computed: the new
adapters enter the chain after the blocks that are still cached.

A block is idle when no request uses it; idle blocks count as free. They are evicted one by one,
least recently used first, and the end of a sequence before its beginning, so that the remaining
blocks can still be found.

If the base has recurrent layers, a prefix can be used up to the last snapshot of its state
(`state_snapshots.py`). Snapshots are taken at two positions of a request: after the last full block
of its prompt, with which the next turn of a conversation begins, and where it diverges from what
was computed before, because other requests with the same beginning will diverge there too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from loraplex.api.pooling import Pooling
from loraplex.api.request import AdapterSet, KeptPrefix
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import KvLayout, kv_owner
from loraplex_services.worker.cache.reclaimer import Offer, reuse_probability
from loraplex_services.worker.cache.state_snapshots import StateSnapshots
from loraplex_services.worker.types.request import RELEASED_BLOCK, Request

PREFIX_OWNER = "prefix cache"
"""Owner name of all cached blocks in the arena, used or idle."""
DEFAULT_TOKEN_S = 1e-4
"""Seconds to compute a token, until one has been measured."""

Key = tuple[int, bytes]
"""KV group and hash."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block whose content is determined by its key."""

    key: Key
    block: int
    num_users: int
    """Number of requests that have the block in their tables."""
    idle_since_s: float = 0.0
    last_used: int = -1
    """The step that was planned last when the block became idle."""


class PrefixCache:
    """Decides which computed blocks are kept, shared and evicted."""

    def __init__(
        self, arena: Arena, layout: KvLayout, base_key: str = "", *, enabled: bool = True
    ) -> None:
        """`base_key` names the base, the KV format and the rope variant. A disabled cache keeps
        nothing."""
        self._arena = arena
        self._layout = layout
        self._base_key = base_key
        self._enabled = enabled
        self._by_key: dict[Key, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, CachedBlock] = OrderedDict()
        """Idle blocks by number, least recently used first."""
        self._passed: OrderedDict[int, CachedBlock] = OrderedDict()
        """Idle blocks that were behind the attention window of the request that released them."""
        self.states = StateSnapshots(arena, layout.state_blocks)
        self.token_s = DEFAULT_TOKEN_S

    @property
    def token_s(self) -> float:
        """Seconds to compute one token again, as measured recently."""
        return self._token_s

    @token_s.setter
    def token_s(self, seconds: float) -> None:
        self._token_s = self.states.token_s = seconds

    @property
    def num_idle(self) -> int:
        """Number of blocks that no request uses."""
        return len(self._idle) + len(self._passed)

    def match(self, request: Request) -> int:
        """Tokens from the start whose KV and state are cached: whole blocks, never all known
        tokens.

        Full groups need every block; windowed ones those that the next token can still see.
        Mutates: what the request keeps of other adapters' KV, if less of it is here.
        """
        needs_all = request.sampling.prompt_logprobs is not None or request.pooling is Pooling.MEAN
        if not self._enabled or needs_all or request.adapters_from:
            self._keep_at_most(request, 0)
        if not self._enabled or needs_all:
            return 0
        needs_state = self._layout.state_blocks > 0
        num_tokens = self._num_cached(request, needs_state=needs_state)
        if request.kept and num_tokens < self._kept_end(request):
            self._keep_at_most(request, num_tokens)
            num_tokens = self._num_cached(request, needs_state=needs_state)
        return num_tokens

    def _num_cached(self, request: Request, *, needs_state: bool) -> int:
        windows, size = self._layout.windows, self._layout.tokens_per_block
        runs = [0] * len(windows)
        best, most = 0, request.num_tokens - 1
        if request.routed_from is not None:  # the cache does not know which experts computed it
            most = min(most, request.routed_from)
        for count in range(1, most // size + 1):
            key = self._hash(request, count - 1)
            runs = [
                run + 1 if (group, key) in self._by_key else 0 for group, run in enumerate(runs)
            ]
            if any(not run and window is None for run, window in zip(runs, windows, strict=True)):
                break
            if needs_state and key not in self.states:
                continue
            live = (count - self._layout.first_live_block(w, count * size) for w in windows)
            if all(run >= needed for run, needed in zip(runs, live, strict=True)):
                best = count
        return best * size

    def share(self, request: Request, num_tokens: int) -> None:
        """Start `request` with its first `num_tokens` computed, as `match` found them.

        Mutates its block tables and num_computed.
        """
        count = num_tokens // self._layout.tokens_per_block
        request.block_tables = []
        for group, window in enumerate(self._layout.windows):
            first = self._layout.first_live_block(window, num_tokens)
            used = [self._use((group, request.prefix_hashes[i])) for i in range(first, count)]
            request.block_tables.append([RELEASED_BLOCK] * first + used)
        request.num_computed = num_tokens
        if self._layout.state_blocks and self._enabled:
            self._share_state(request)

    def _share_state(self, request: Request) -> None:
        """Let a request begin from a snapshot, and mark where its own are to be taken."""
        if request.num_computed:
            request.state_key = self.state_key(request, request.num_computed)
            self.states.use(request.state_key)
        size = self._layout.tokens_per_block
        branch = self._num_cached(request, needs_state=False)
        last = (request.num_tokens - 1) // size * size
        marks = {mark for mark in (branch, last) if mark > request.num_computed}
        request.state_marks = tuple(sorted(marks))

    def state_key(self, request: Request, num_tokens: int) -> bytes:
        """Key of the state after the first `num_tokens` tokens, which are whole blocks."""
        return self._hash(request, num_tokens // self._layout.tokens_per_block - 1)

    def leave(self, request: Request, blocks: Iterable[int], now: float) -> None:
        """Note that `request` no longer has `blocks` in its tables, and release its states."""
        if request.state_key:
            self.states.give_back(request.state_key, now)
            request.state_key = b""
        request.state_marks = ()
        self.give_back(request, blocks, now)

    def keep(self, request: Request, start: int) -> None:
        """Keep the blocks that were completed by the positions from `start` to num_computed, which
        have been given to steps. Their tokens are known.

        Mutates the request's tables where another request has computed the same block before.
        """
        size = self._layout.tokens_per_block
        first, end = start // size, request.num_computed // size
        if first == end or not self._enabled:
            return
        for index in range(first, end):
            key = self._hash(request, index)
            for group, table in enumerate(request.block_tables):
                if table[index] != RELEASED_BLOCK:
                    table[index] = self._keep((group, key), table[index], request)

    def give_back(
        self, request: Request, blocks: Iterable[int], now: float, *, passed: bool = False
    ) -> None:
        """Note that `request` no longer has `blocks` in its tables; `passed` = they are behind its
        window.

        The first of `blocks` is the first to be evicted.
        """
        own: list[int] = []
        for block in blocks:
            cached = self._by_block.get(block)
            if cached is None:
                own.append(block)
                continue
            assert cached.num_users > 0, f"block {block} given back more often than used"
            cached.num_users -= 1
            if not cached.num_users:
                cached.idle_since_s, cached.last_used = now, self._arena.last_planned
                (self._passed if passed else self._idle)[block] = cached
        self._arena.free(kv_owner(request), own)

    def idle_blocks(self, protected: Collection[str]) -> int:
        """Number of blocks that could be evicted. `protected` names adapters, so it protects none
        of them."""
        return self.num_idle

    def offer(self, protected: Collection[str], now: float) -> Offer | None:
        """The idle block that would be evicted next. Blocks behind windows cost nothing."""
        if self._passed:
            return Offer(1, 0.0, 0.0)
        if not self._idle:
            return None
        oldest = next(iter(self._idle.values()))
        restore_s = self._layout.tokens_per_block * self.token_s / self._layout.num_groups
        return Offer(1, restore_s, reuse_probability(now - oldest.idle_since_s))

    def give_up(self, protected: Collection[str], whole_block: bool) -> None:
        """Free the block that `offer` named."""
        _, cached = (self._passed or self._idle).popitem(last=False)
        del self._by_key[cached.key], self._by_block[cached.block]
        self._arena.free(PREFIX_OWNER, [cached.block], cached.last_used)

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that users are the rows of `tables`, and that ownership agrees."""
        users = dict.fromkeys(self._by_block, 0)
        for table in tables:
            for block in set(table) & users.keys():
                users[block] += 1
        assert users == {b: cached.num_users for b, cached in self._by_block.items()}
        idle = {block for block, count in users.items() if not count}
        assert idle == {*self._idle, *self._passed}, "idle blocks and their queues differ"
        assert not self._idle.keys() & self._passed.keys()
        assert self._arena.blocks_by_owner().get(PREFIX_OWNER, set()) == users.keys()
        assert all(self._by_key[c.key] is c and c.block == b for b, c in self._by_block.items())
        assert len(self._by_key) == len(self._by_block)

    def is_cached(self, block: int) -> bool:
        """True for blocks that belong to the cache, used or idle."""
        return block in self._by_block

    def _use(self, key: Key) -> int:
        cached = self._by_key[key]
        if not cached.num_users:
            self._idle.pop(cached.block, None)
            self._passed.pop(cached.block, None)
        cached.num_users += 1
        return cached.block

    def _keep(self, key: Key, block: int, request: Request) -> int:
        """Add `block` to the cache, unless it has one with this key. Returns the block to read."""
        if key in self._by_key:
            kept = self._use(key)
            assert kept != block, f"block {block} was completed twice"
            self._arena.free(kv_owner(request), [block])
            return kept
        self._arena.transfer(kv_owner(request), PREFIX_OWNER, [block])
        self._by_key[key] = self._by_block[block] = CachedBlock(key, block, num_users=1)
        return block

    def _kept_end(self, request: Request) -> int:
        """The number of tokens in full blocks that other adapters computed."""
        size = self._layout.tokens_per_block
        return max(part.num_tokens // size * size for part in request.kept)

    def _keep_at_most(self, request: Request, num_tokens: int) -> None:
        """Note that the request's own adapters compute everything after `num_tokens`. Mutates:
        request."""
        if not request.kept:
            return
        parts = []
        end = 0
        for part in request.kept:
            if end < (new_end := min(part.num_tokens, num_tokens)):
                parts.append(KeptPrefix(part.adapters, new_end))
                end = new_end
        request.kept = tuple(parts)
        del request.prefix_hashes[end // self._layout.tokens_per_block :]

    def _joining(self, request: Request, start: int) -> bytes:
        """What enters the hash chain at the block that begins at `start`, in addition to its
        tokens."""
        size = self._layout.tokens_per_block
        if 0 < request.adapters_from and start <= request.adapters_from < start + size:
            return repr((request.adapters.key(), request.adapters_from)).encode()
        if not request.kept:
            return b""
        before, now = self._computed_by(request, start - 1), self._computed_by(request, start)
        return repr((now.key(), start)).encode() if start and before != now else b""

    def _computed_by(self, request: Request, position: int) -> AdapterSet:
        """The adapters that compute the block of a position."""
        size = self._layout.tokens_per_block
        parts = (p.adapters for p in request.kept if position < p.num_tokens // size * size)
        return next(parts, request.adapters)

    def _hash(self, request: Request, index: int) -> bytes:
        """Hash of block `index`; extends the request's chain as far as needed."""
        chain, size = request.prefix_hashes, self._layout.tokens_per_block
        while len(chain) <= index:
            start = len(chain) * size
            tokens = array("q", request.tokens(start, start + size)).tobytes()
            previous = chain[-1] if chain else self._root(request)
            if joining := self._joining(request, start):
                previous = hashlib.sha256(previous + joining).digest()
            chain.append(hashlib.sha256(previous + tokens).digest())
        return chain[index]

    def _root(self, request: Request) -> bytes:
        """The salt may be a user's: it divides a tenant's blocks, and never leads to another's."""
        rope = request.is_long, request.rope.key if request.rope else ""
        adapters = AdapterSet() if request.adapters_from else self._computed_by(request, 0)
        parts = (self._base_key, rope, adapters.key(), request.tenant, request.cache_salt)
        return hashlib.sha256(repr(parts).encode()).digest()
