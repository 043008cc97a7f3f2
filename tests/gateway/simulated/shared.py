"""What gateways share: a registry that may be away and a metadata server that may be away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisAway

from loraplex.adapter_format import File
from loraplex.api.registry import Tag, TagTarget
from loraplex.errors import AdapterNotFound, Unavailable
from loraplex.refs import Ref
from loraplex_services.gateway.admission.token_buckets import Bucket
from loraplex_services.gateway.registry.snapshot import RegistrySnapshot, Version
from tests.gateway.simulated.worker import BASE_ID


class SimulatedRegistry:
    """Knows every adapter; gateways know those that were there when they started."""

    def __init__(self, names: Sequence[str]) -> None:
        self.is_away = False
        self._versions = {name: _version(name, number) for number, name in enumerate(names)}

    def snapshot(self, names: Sequence[str]) -> RegistrySnapshot:
        """Of some adapters."""
        snapshot = RegistrySnapshot()
        for name in names:
            snapshot.put_version(self._versions[name])
            snapshot.put_tag(_latest(name))
        return snapshot

    async def lookup(
        self, ref: Ref, split_key: str, base_ids: Collection[str]
    ) -> tuple[Version, tuple[Tag, ...]]:
        """Raises: Unavailable, AdapterNotFound."""
        await asyncio.sleep(0.005)
        if self.is_away:
            raise Unavailable("the registry is away")
        if ref.name not in self._versions:
            raise AdapterNotFound(str(ref))
        return self._versions[ref.name], (_latest(ref.name),)

    async def read_files(self, label: str, files: Sequence[File]) -> dict[str, bytes]:
        """These adapters bring none. Raises: AdapterNotFound."""
        raise AdapterNotFound(label)


def _version(name: str, number: int) -> Version:
    digest = f"sha256:{number:064x}"
    return Version("default", name, 1, digest, BASE_ID, is_public=True)


def _latest(name: str) -> Tag:
    return Tag("default", name, "latest", (TagTarget(1, "sha256:0"),), 1, 0.0)


class SimulatedRedis:
    """Runs the reservoir's two scripts, in the manner of their Lua."""

    def __init__(self) -> None:
        self.is_away = False
        self._buckets: dict[str, Bucket] = {}
        self._signed: dict[str, float] = {}
        self._held: dict[str, dict[str, tuple[int, int, float]]] = {}
        """By key and gateway: held, wanted, until when."""

    def register_script(self, text: str) -> Callable[[list[str], list[Any]], Awaitable[Any]]:
        """Signing has two arguments, asking and holding five."""

        async def call(keys: list[str], arguments: Sequence[Any]) -> Any:
            await asyncio.sleep(0.001)
            if self.is_away:
                raise RedisAway("connection refused")
            now_s = asyncio.get_running_loop().time()
            if len(arguments) == 2:
                return self._sign(*[*arguments, now_s])
            if ":held:" in keys[0]:
                return self._hold(keys[0], *[*arguments, now_s])
            return self._ask(keys[0], *[*arguments, now_s])

        return call

    async def aclose(self) -> None:
        """Nothing is kept."""

    def _sign(self, gateway: str, gone_s: float, now_s: float) -> int:
        self._signed[gateway] = now_s
        self._signed = {g: at for g, at in self._signed.items() if at > now_s - gone_s}
        return len(self._signed)

    def _ask(
        self,
        name: str,
        rate: float,
        need: float,
        extra: float,
        returned: float,
        capacity: float,
        now_s: float,
    ) -> list[str]:
        bucket = self._buckets.setdefault(name, Bucket(capacity, now_s))
        grant = bucket.ask(rate, need, extra, returned, now_s)
        return [str(grant.amount), str(grant.wait_s)]

    def _hold(
        self, key: str, mine: str, limit: int, want: int, running: int, ttl_s: float, now_s: float
    ) -> int:
        entries = self._held.setdefault(key, {})
        others = [e for g, e in entries.items() if g != mine and e[2] >= now_s]
        held, wanted = sum(e[0] for e in others), sum(e[1] for e in others)
        part = max(limit // (sum(e[1] > 0 for e in others) + 1), 1)
        share = max(min(want, max(part, limit - wanted), limit - held), 0)
        entries[mine] = (max(share, running), want, now_s + ttl_s)
        return share
