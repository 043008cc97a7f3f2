"""The running requests of this gateway, and what changes them from outside: pauses and tag moves.

A request that follows its tag continues with the new version as soon as the workers that run it
have fetched that; until then it continues with the old one. Nothing else waits for the load. It
begins when the version is published, while the registry still moves the tag. New versions of an
adapter that was just used are loaded in the same way, so that new requests need not wait either."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from loraplex.api.request import UpdatePolicy
from loraplex.errors import DeadlineExceeded, InvalidRequest, LoraplexError, ResourceExhausted
from loraplex.refs import parse_ref
from loraplex_services.common.limits import MAX_PAUSED_PER_TENANT
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.common.shared_work import SharedWork
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.pipeline.held_prompts import HeldPrompts
from loraplex_services.gateway.pipeline.prepared import PreparedRequest, adapter_set, scaled
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.registry.snapshot import Adapter, Version
from loraplex_services.gateway.request import GenerateCall, Target
from loraplex_services.gateway.routing.steering import Steering
from loraplex_services.gateway.workers.fleet import Fleet

logger = logging.getLogger(__name__)

EVERYTHING: Adapter = ("", "")
"""The scope of a pause of all models."""
LOAD_TIMEOUT_S = 60.0
LOADED_S = 5.0
"""How long a worker is not asked again to load an adapter. If it has evicted the adapter since, the
request waits for it there like any other."""
_MAX_LOADED = 1000
IN_USE_S = 60.0
"""How long after its last request an adapter counts as in use."""
_MAX_IN_USE = 1000
SWITCHES_AT_ONCE = 16
"""Requests that begin to follow a moved tag before the event loop does other work."""


class PauseMode(enum.StrEnum):
    """The ways to pause a model, which differ in what happens to its running requests. As in
    vLLM."""

    ABORT = "abort"
    """Running requests end immediately with what they have generated."""
    WAIT = "wait"
    """Running requests end as usual, and the pause begins when they have ended."""
    KEEP = "keep"
    """Running requests are paused, and continue afterwards."""


class LiveRequest:
    """A `PreparedRequest` that waits or runs; made by `LiveRequests`, which can interrupt it."""

    def __init__(self, prepared: PreparedRequest) -> None:
        policy = prepared.call.on_update
        self.prepared = prepared
        self.follows = policy is not UpdatePolicy.FINISH
        keeps_prefix = policy is UpdatePolicy.FOLLOW_KEEP_PREFIX
        self.steering = Steering(prepared.adapter_set, keeps_prefix=keeps_prefix)
        self.scopes = {EVERYTHING, *_adapters_of(prepared)}
        self.is_switching = False
        self.has_moved = False
        """Whether its tags moved since it was last decided what it runs with."""
        self.resumed = asyncio.Event()
        self.ended = asyncio.Event()


class LiveRequests:
    """The requests that wait or run, the pauses, and the switches to other versions."""

    def __init__(self, resolver: Resolver, fleet: Fleet, *, limits_prompts: bool = False) -> None:
        """Follows the tags of `resolver` from now on.

        Args:
            limits_prompts: requests are refused while the prompts of their tenant hold too much.
        """
        self._resolver = resolver
        self._fleet = fleet
        self._live: set[LiveRequest] = set()
        self._following: set[LiveRequest] = set()
        """Those of them that follow tags."""
        self._paused: dict[Adapter, PauseMode] = {}
        self._held_up: set[LiveRequest] = set()
        """Requests that wait for the end of a pause."""
        self._loads: SharedWork[tuple[str, str], None] = SharedWork()
        """Loads in progress, by worker and digest."""
        self._loaded_s: LruCache[tuple[str, str], float] = LruCache(_MAX_LOADED)
        """When loads ended, on the clock of the event loop."""
        self._used: LruCache[tuple[Adapter, str], tuple[float, set[str]]] = LruCache(_MAX_IN_USE)
        """When the last request of an adapter ended, and which workers had run it, by adapter and
        base."""
        self._ahead: set[Adapter] = set()
        """Adapters of which a version is being loaded before its tag moves."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = HeldPrompts() if limits_prompts else None
        resolver.on_moves = self._moved
        resolver.on_versions = self._published

    def all(self) -> list[LiveRequest]:
        """The requests that wait for admission or run."""
        return list(self._live)

    def paused(self) -> dict[Adapter, PauseMode]:
        """The paused adapters, with the mode of each pause."""
        return dict(self._paused)

    @asynccontextmanager
    async def entered(self, prepared: PreparedRequest) -> AsyncGenerator[Steering]:
        """Wait until the request's model is not paused, then count it as running.

        Raises: DeadlineExceeded, ResourceExhausted.
        """
        live = LiveRequest(prepared)
        with ExitStack() as stack:
            if self._held is not None:
                num_tokens = len(prepared.prompt_ids)
                stack.enter_context(self._held.counted(prepared.call.tenant, num_tokens))
            await self._until_not_paused(live)
            self._live.add(live)
            if live.follows:  # Its tags may have moved since they were resolved.
                self._following.add(live)
                self._begin_to_switch([live])
            try:
                yield live.steering
            finally:
                self._live.discard(live)
                self._following.discard(live)
                live.ended.set()
                self._note_use(live)

    def _note_use(self, live: LiveRequest) -> None:
        """Remember where an ended request has run."""
        if addresses := live.steering.used_addresses:
            for scope in live.scopes - {EVERYTHING}:
                self._used.put((scope, live.prepared.base.base_id), (now_s(), addresses))

    async def pause(self, scope: Adapter, mode: PauseMode) -> None:
        """Keep new requests of a scope waiting. Returns once its running requests have ended or
        paused, as `mode` demands. Raises: ResourceExhausted if its tenant has paused too many
        adapters."""
        others = sum(tenant == scope[0] for tenant, _ in self._paused.keys() - {scope})
        if others >= MAX_PAUSED_PER_TENANT:
            raise ResourceExhausted(
                f"tenant {scope[0]!r} has paused {others} adapters; resume some first",
                reason="TOO_MANY_PAUSED",
            )
        self._paused[scope] = mode
        running = [live for live in self._live if scope in live.scopes]
        for live in running:
            if mode is PauseMode.KEEP:
                live.steering.hold()
            elif mode is PauseMode.ABORT:
                live.steering.abort()
        if mode is PauseMode.WAIT:
            await asyncio.gather(*(live.ended.wait() for live in running))

    def resume(self, scope: Adapter) -> None:
        """End the pause of a scope, if there is one."""
        self._paused.pop(scope, None)
        for live in self._live:
            if scope in live.scopes and not self._is_paused(live):
                live.steering.release()
        for live in self._held_up:
            if scope in live.scopes and not self._is_paused(live):
                live.resumed.set()

    def abort(self, tenant: str, request_ids: Collection[str]) -> int:
        """End the requests of a tenant that have these ids, with the output so far; returns their
        number."""
        found = [
            live
            for live in self._live | self._held_up
            if live.prepared.call.tenant == tenant and live.prepared.call.request_id in request_ids
        ]
        for live in found:
            live.steering.abort()
            live.resumed.set()
        return len(found)

    def _is_paused(self, live: LiveRequest) -> bool:
        return any(scope in self._paused for scope in live.scopes)

    async def _until_not_paused(self, live: LiveRequest) -> None:
        if not self._is_paused(live):
            return
        self._held_up.add(live)
        try:
            async with asyncio.timeout(max(live.prepared.deadline_s - now_s(), 0.0)):
                while self._is_paused(live) and not live.steering.is_aborted:
                    live.resumed.clear()
                    await live.resumed.wait()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the model was paused") from None
        finally:
            self._held_up.discard(live)

    def _published(self, versions: Sequence[Version]) -> None:
        """Load new versions of adapters whose tags are followed, where these requests run, and of
        adapters in use, where their last request has run. Of one adapter, only one at a time is
        loaded like this."""
        running = defaultdict[tuple[Adapter, str], set[str]](set)
        for live in self._following:
            for scope in live.scopes:
                running[scope, live.prepared.base.base_id].update(live.steering.addresses)
        for version in versions:
            scope = version.tenant, version.name.lower()
            addresses = running[scope, version.base_id]
            used_s, used_at = self._used.get((scope, version.base_id)) or (0.0, set())
            if now_s() - used_s < IN_USE_S:
                addresses = addresses | used_at
            if addresses and scope not in self._ahead:
                self._ahead.add(scope)
                self._run(self._load_ahead(scope, addresses, version.digest))

    def _moved(self, adapters: Collection[Adapter] | None) -> None:
        """Switch the requests that follow tags of these adapters, or of any if None."""
        self._begin_to_switch(
            [
                live
                for live in self._following
                if adapters is None or not live.scopes.isdisjoint(adapters)
            ]
        )

    def _begin_to_switch(self, lives: Sequence[LiveRequest]) -> None:
        """A switch in progress looks at the tags once more; the other requests begin one."""
        for live in lives:
            live.has_moved = True
        others = [live for live in lives if not live.is_switching]
        for live in others:
            live.is_switching = True
        if others:
            self._run(self._switch_all(others))

    async def _switch_all(self, lives: Sequence[LiveRequest]) -> None:
        """Begin to switch requests, a few at a time, so that thousands do not delay others."""
        for begin in range(0, len(lives), SWITCHES_AT_ONCE):
            for live in lives[begin : begin + SWITCHES_AT_ONCE]:
                self._run(self._switch(live))
            await asyncio.sleep(0)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _switch(self, live: LiveRequest) -> None:
        """Move a request to what its tags point at, however often they move in the meantime."""
        try:
            while live.has_moved:
                live.has_moved = False
                await self._follow(live)
        finally:
            live.is_switching = False

    async def _follow(self, live: LiveRequest) -> None:
        """Move a request to what its tags point at, unless a worker cannot load that."""
        try:
            if (target := await self._new_target(live)) is None:
                return
            addresses = live.steering.addresses
            digests = [adapter.digest for adapter in target.adapters]
            await asyncio.gather(*(self._load(a, d) for a in addresses for d in digests))
        except LoraplexError as error:
            logger.warning("a request keeps its version", extra={"reason": error.reason})
            return
        live.prepared.note_labels(target, live.steering.used)
        live.steering.switch(adapter_set(target))

    async def _new_target(self, live: LiveRequest) -> Target | None:
        """The target of the request's tags now; None if it need not, or cannot, move to it."""
        if live.ended.is_set():
            return None
        prepared = live.prepared
        target = scaled(await self._resolver.target(prepared.call), prepared.resolved.scale)
        is_new = adapter_set(target) != live.steering.adapters
        return target if is_new and prepared.can_follow(target) else None

    async def _load_ahead(self, scope: Adapter, addresses: Collection[str], digest: str) -> None:
        try:
            await asyncio.gather(*(self._load(address, digest) for address in addresses))
        except LoraplexError as error:
            logger.info("version not loaded before its tag moves", extra={"reason": error.reason})
        finally:
            self._ahead.discard(scope)

    async def _load(self, address: str, digest: str) -> None:
        """Load an adapter on a worker, once for all requests that wait for it. The worker's next
        step can use it: waiting for the news that it was copied would often take one step more."""
        key = (address, digest)
        if now_s() - (self._loaded_s.get(key) or -LOADED_S) < LOADED_S:
            return
        await self._loads.wait(
            key,
            lambda: self._fleet.load(address, digest, LOAD_TIMEOUT_S, when_fetched=True),
        )
        self._loaded_s.put(key, now_s())


def check_update_policy(call: GenerateCall, target: Target) -> None:
    """Raises: InvalidRequest if a request is to follow and names no tag, or not only tags."""
    if call.on_update is UpdatePolicy.FINISH:
        return
    refs = [each.ref for each in call.adapters] or [call.model]
    if not target.adapters or any(parse_ref(ref, call.tenant).tag is None for ref in refs):
        raise InvalidRequest.field(
            "on_update", call.on_update, "only a tag can be followed: name NAME or NAME:TAG"
        )


def _adapters_of(prepared: PreparedRequest) -> set[Adapter]:
    """The adapters that a request runs with, by tenant and name in lower case."""
    names = (adapter.label.rpartition(":")[0] for adapter in prepared.target.adapters)
    split = (name.partition("/") for name in names)
    return {(tenant, name.lower()) for tenant, _, name in split}
