"""A registry at the wire that says what the test put into it: a peer for gateway tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc

from loraplex.api.error_wire import to_status
from loraplex.errors import AdapterNotFound, Conflict, LoraplexError, Unauthenticated
from loraplex.refs import parse_ref
from loraplex.v1 import registry_pb2, registry_pb2_grpc

Watch = asyncio.Queue[registry_pb2.WatchAdaptersResponse]


def digest_of(name: str, version: int) -> str:
    """A digest that shows what it stands for."""
    return "sha256:" + (name.encode().hex() + f"{version:04x}").rjust(64, "0")[-64:]


class ScriptedRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """Versions and tags by hand."""

    def __init__(self) -> None:
        self.versions: dict[tuple[str, str, int], registry_pb2.AdapterVersion] = {}
        self.tags: dict[tuple[str, str, str], registry_pb2.Tag] = {}
        self.bases: list[registry_pb2.Base] = []
        self.keys: dict[str, registry_pb2.Key] = {}
        """By token."""
        self.tenants: dict[str, registry_pb2.Tenant] = {}
        self.num_lookups = 0
        self.refuses_bases: LoraplexError | None = None
        self.num_refused_bases = 0
        self._watches: list[Watch] = []

    def put(
        self,
        name: str,
        version: int = 1,
        *,
        tenant: str = "default",
        base_id: str = "base",
        visibility: registry_pb2.Visibility = registry_pb2.VISIBILITY_PRIVATE,
        labels: Mapping[str, str] | None = None,
        announce: bool = True,
    ) -> registry_pb2.AdapterVersion:
        """Publish a version and move `latest` to it; without `announce` watchers hear nothing."""
        made = registry_pb2.AdapterVersion(
            tenant=tenant,
            name=name,
            version=version,
            digest=digest_of(name, version),
            base_id=base_id,
            created_unix_s=1.7e9,
            max_rank=8,
            visibility=visibility,
            adapter_labels=labels,
        )
        self.versions[tenant, name, version] = made
        if announce:
            self._announce(registry_pb2.AdapterEvent(version=made))
        self.tag(name, "latest", {version: 1}, tenant=tenant, announce=announce)
        return made

    def tag(
        self,
        name: str,
        tag: str,
        weights: dict[int, int],
        *,
        tenant: str = "default",
        announce: bool = True,
    ) -> None:
        """Point a tag at versions by weight."""
        before = self.tags.get((tenant, name, tag))
        made = registry_pb2.Tag(
            tenant=tenant,
            name=name,
            tag=tag,
            generation=before.generation + 1 if before else 1,
            updated_unix_s=before.updated_unix_s + 1 if before else 1.0,
        )
        for version, weight in weights.items():
            made.targets.add(version=version, digest=digest_of(name, version), weight=weight)
        self.tags[tenant, name, tag] = made
        if announce:
            self._announce(registry_pb2.AdapterEvent(tag=made))

    async def GetAdapter(self, request: Any, context: Any) -> registry_pb2.GetAdapterResponse:
        self.num_lookups += 1
        ref = parse_ref(request.ref)
        number = ref.version
        if ref.tag is not None and (tag := self.tags.get((ref.tenant, ref.name, ref.tag))):
            number = tag.targets[0].version
        found = self.versions.get((ref.tenant, ref.name, number or 0))
        if found is None:
            await _abort(context, AdapterNotFound(request.ref))
        tags = [t for (tenant, name, _), t in self.tags.items() if (tenant, name) == _key(found)]
        return registry_pb2.GetAdapterResponse(version=found, tags=tags)

    async def RegisterBase(self, request: Any, context: Any) -> registry_pb2.RegisterBaseResponse:
        if self.refuses_bases is not None:
            self.num_refused_bases += 1
            await _abort(context, self.refuses_bases)
        self.bases.append(request.base)
        return registry_pb2.RegisterBaseResponse(base=request.base)

    async def CheckKey(self, request: Any, context: Any) -> registry_pb2.CheckKeyResponse:
        sent = dict(context.invocation_metadata())
        assert sent["authorization"] == "Bearer scripted", "services show their token"
        by_id = {key.key_id: key for key in self.keys.values()}
        key = self.keys.get(request.token) if request.token else by_id.get(request.key_id)
        if key is None:
            await _abort(context, Unauthenticated("the API key is unknown"))
        return registry_pb2.CheckKeyResponse(key=key)

    async def ListTenants(self, request: Any, context: Any) -> registry_pb2.ListTenantsResponse:
        found = self.tenants.get(request.tenant, registry_pb2.Tenant(tenant=request.tenant))
        return registry_pb2.ListTenantsResponse(tenants=[found])

    async def RecordUsage(self, request: Any, context: Any) -> registry_pb2.RecordUsageResponse:
        return registry_pb2.RecordUsageResponse()

    def stage(
        self, name: str, tag: str, version: int, *, within_s: float = 30.0, clock_s: float = 0.0
    ) -> None:
        """Note a version as pending; the registry's clock differs by `clock_s`."""
        made = self.tags["default", name, tag]
        made.generation += 1
        made.pending.add(version=version, digest=digest_of(name, version), weight=1)
        made.pending_until_unix_s = time.time() + clock_s + within_s
        made.pending_left_s = within_s
        self._announce(registry_pb2.AdapterEvent(tag=made))

    async def FinishStagedMove(
        self, request: Any, context: Any
    ) -> registry_pb2.FinishStagedMoveResponse:
        tag = self.tags["default", request.name.partition("/")[2], request.tag]
        if tag.generation != request.generation or not tag.pending:
            await _abort(context, Conflict("the tag has changed"))
        if not request.failure:
            del tag.targets[:]
            tag.targets.extend(tag.pending)
        tag.pending_reason = request.failure
        del tag.pending[:]
        tag.generation += 1
        tag.updated_unix_s += 1
        self._announce(registry_pb2.AdapterEvent(tag=tag))
        return registry_pb2.FinishStagedMoveResponse(tag=tag)

    async def WatchAdapters(
        self, request: Any, context: Any
    ) -> AsyncGenerator[registry_pb2.WatchAdaptersResponse, None]:
        watch: Watch = asyncio.Queue()
        self._watches.append(watch)
        events = [registry_pb2.AdapterEvent(version=v) for v in self.versions.values()]
        events += [registry_pb2.AdapterEvent(tag=t) for t in self.tags.values()]
        yield registry_pb2.WatchAdaptersResponse(snapshot_begin=True)
        yield registry_pb2.WatchAdaptersResponse(
            events=events, snapshot_end=True, resume_token="t1"
        )
        while True:
            yield await watch.get()

    def _announce(self, event: registry_pb2.AdapterEvent) -> None:
        for watch in self._watches:
            watch.put_nowait(registry_pb2.WatchAdaptersResponse(events=[event], resume_token="t2"))


def _key(version: registry_pb2.AdapterVersion) -> tuple[str, str]:
    return version.tenant, version.name


async def _abort(context: Any, error: LoraplexError) -> None:
    status = to_status(error)
    await context.abort(status.code, status.details, tuple(status.trailing_metadata))


async def start_registry(registry: ScriptedRegistry, listen: str) -> grpc.aio.Server:
    """Serve it at an address."""
    server = grpc.aio.server()
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    server.add_insecure_port(listen)
    await server.start()
    return server
