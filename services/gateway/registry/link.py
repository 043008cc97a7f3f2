"""The connection to the registry: follows its changes and looks up what is missing."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from loraplex.adapter_format import File
from loraplex.api import registry_wire
from loraplex.api.error_wire import from_rpc_error, has_details
from loraplex.api.registry import Tag, UsageEntry
from loraplex.api.tenants import TenantLimits
from loraplex.errors import DataLoss, LoraplexError, Unavailable
from loraplex.refs import Ref
from loraplex.v1 import registry_pb2, registry_pb2_grpc
from loraplex_services.common.callers import Caller
from loraplex_services.common.grpc.channels import PLAIN_CHANNELS, Channels
from loraplex_services.gateway.registry.convert import version_from_wire
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.registry.snapshot import Adapter, RegistrySnapshot, Version

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 2.0
REGISTER_TIMEOUT_S = 10.0
_RENEW_CHECK_S = 10.0
_RETRY_S = (0.1, 0.2, 0.5, 1.0)


class RegistryLink:
    """One channel to the registry."""

    def __init__(
        self,
        address: str,
        metadata: Sequence[tuple[str, str]] = (),
        channels: Channels = PLAIN_CHANNELS,
    ) -> None:
        """`metadata` is sent with every call, such as a service token."""
        self._address = address
        self._channels = channels
        self._open()
        self._metadata = tuple(metadata)
        self.has_snapshot = asyncio.Event()
        """Set once the first snapshot is complete."""
        self._is_current = False

    def _open(self) -> None:
        self._channel_version = self._channels.version
        self._channel = self._channels.open(self._address)
        self._stub = registry_pb2_grpc.RegistryServiceStub(self._channel)

    @property
    def is_watching(self) -> bool:
        """True while the watch is open and past its snapshot."""
        return self._is_current and self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def _call(self, method: Any, request: Any, timeout_s: float = LOOKUP_TIMEOUT_S) -> Any:
        """Raises: LoraplexError."""
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error_of(error) from None

    async def lookup(
        self, ref: Ref, split_key: str, base_ids: Collection[str]
    ) -> tuple[Version, tuple[Tag, ...]]:
        """Resolve one reference at the registry. Raises: NotFound, Unavailable."""
        request = registry_pb2.GetAdapterRequest(
            ref=str(ref), split_key=split_key, base_ids=sorted(base_ids)
        )
        answer = await self._call(self._stub.GetAdapter, request)
        tags = tuple(registry_wire.tag(tag) for tag in answer.tags)
        return version_from_wire(answer.version), tags

    async def read_files(self, label: str, files: Sequence[File]) -> dict[str, bytes]:
        """Contents of some files of a version, by path, equal to their sha256.

        Raises: LoraplexError, such as DataLoss if the bytes do not match.
        """
        wanted = {file.path: file for file in files}
        found = {path: bytearray() for path in wanted}
        request = registry_pb2.DownloadAdapterRequest(
            ref=label, paths=list(wanted), reader_verifies=True
        )
        call = self._stub.DownloadAdapter(
            request, timeout=REGISTER_TIMEOUT_S, metadata=self._metadata
        )
        try:
            async for part in call:
                if part.WhichOneof("part") != "chunk":
                    continue
                path = part.chunk.path
                if path not in wanted or len(found[path]) + len(part.chunk.data) > (
                    wanted[path].size
                ):
                    raise DataLoss(
                        f"{path} of {label} is not the file that was requested from the registry"
                    )
                found[path] += part.chunk.data
        except grpc.RpcError as error:
            raise _error_of(error) from None
        finally:
            call.cancel()
        for path, content in found.items():
            digest = await asyncio.to_thread(hashlib.sha256, content)
            if digest.hexdigest() != wanted[path].sha256:
                raise DataLoss(f"{path} of {label} is not what was published")
        return {path: bytes(content) for path, content in found.items()}

    async def register_base(self, base: registry_pb2.Base, *, replace: bool) -> None:
        """Publish a base's geometry. Raises: LoraplexError, such as a clash with another base, or
        what the transport says, for the log."""
        request = registry_pb2.RegisterBaseRequest(base=base, replace=replace)
        try:
            await self._stub.RegisterBase(
                request, timeout=REGISTER_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def check_key(self, token: str) -> Caller:
        """The caller that holds an API key. Raises: Unauthenticated, or Unavailable and the
        like."""
        return await self._check_key(registry_pb2.CheckKeyRequest(token=token))

    async def check_key_id(self, key_id: str) -> Caller:
        """The caller that holds a key that was checked before. Raises as `check_key`."""
        return await self._check_key(registry_pb2.CheckKeyRequest(key_id=key_id))

    async def _check_key(self, request: registry_pb2.CheckKeyRequest) -> Caller:
        key = (await self._call(self._stub.CheckKey, request)).key
        return Caller(key.tenant, key.key_id, frozenset(key.scopes), key.expires_unix_s)

    async def tenant(self, tenant: str) -> TenantLimits:
        """The limits of one tenant. Raises: LoraplexError."""
        request = registry_pb2.ListTenantsRequest(tenant=tenant)
        answer = await self._call(self._stub.ListTenants, request)
        found = [registry_wire.tenant(each) for each in answer.tenants if each.tenant == tenant]
        return found[0] if found else TenantLimits(tenant)

    async def record_usage(self, report: registry_pb2.RecordUsageRequest) -> None:
        """Report what was used. Raises: LoraplexError."""
        await self._call(self._stub.RecordUsage, report, REGISTER_TIMEOUT_S)

    async def usage(self, tenant: str, model: str, since: str) -> list[UsageEntry]:
        """The usage of a tenant, by day and model. Raises: LoraplexError."""
        request = registry_pb2.ListUsageRequest(tenant=tenant, model=model, since=since)
        answer = await self._call(self._stub.ListUsage, request, REGISTER_TIMEOUT_S)
        return [registry_wire.usage_entry(entry) for entry in answer.entries]

    async def finish_staged_move(self, tag: Tag, failure: str) -> None:
        """Complete a staged move, or drop it for a reason. Raises: Conflict, Unavailable."""
        request = registry_pb2.FinishStagedMoveRequest(
            name=f"{tag.tenant}/{tag.name}",
            tag=tag.tag,
            generation=tag.generation,
            failure=failure,
        )
        await self._call(self._stub.FinishStagedMove, request, REGISTER_TIMEOUT_S)

    async def follow(self, resolver: Resolver) -> None:
        """Keep `resolver.snapshot` up to date until cancelled; the last one stays while
        disconnected."""
        watch = _Watch(resolver)
        while True:
            following = asyncio.create_task(self._follow(watch))
            replaced = asyncio.create_task(self._replaced())
            try:
                await asyncio.wait({following, replaced}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
            finally:
                following.cancel()
                replaced.cancel()
                await asyncio.gather(following, replaced, return_exceptions=True)
            watch.abandon_snapshot()
            old = self._channel
            self._open()
            await old.close(LOOKUP_TIMEOUT_S)

    async def _replaced(self) -> None:
        """Return when the certificate shown to the registry was replaced.

        Calls that wait on the old channel would otherwise keep presenting the old certificate.
        """
        while self._channel_version == self._channels.version:
            await asyncio.sleep(_RENEW_CHECK_S)

    async def _follow(self, watch: _Watch) -> None:
        failures, problem = 0, ""
        while True:
            try:
                async with aclosing(self._changes(watch.resume_token)) as messages:
                    async for message in messages:
                        failures, problem = 0, ""
                        watch.apply(message)
                        self._is_current = not watch.in_snapshot
                        if self._is_current:
                            self.has_snapshot.set()
            except LoraplexError as error:
                if error.message != problem:
                    fields = {"reason": error.reason, "problem": error.message}
                    logger.warning("registry watch failed", extra=fields)
                problem = error.message
                watch.forget_resume_token(after=error)
            self._is_current = bool(watch.resume_token)
            watch.abandon_snapshot()
            if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
                failures = 0  # gRPC has a back-off of its own for attempts to connect
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def _changes(
        self, resume_token: str
    ) -> AsyncGenerator[registry_pb2.WatchAdaptersResponse]:
        call = self._stub.WatchAdapters(
            registry_pb2.WatchAdaptersRequest(resume_token=resume_token),
            metadata=self._metadata,
        )
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()


class _Watch:
    """Applies messages of the watch: a new snapshot replaces the old one when it is complete."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._building: RegistrySnapshot | None = None
        self.resume_token = ""

    @property
    def in_snapshot(self) -> bool:
        """True between the first and the last message of a snapshot."""
        return self._building is not None

    def apply(self, message: registry_pb2.WatchAdaptersResponse) -> None:
        """Mutates: the resolver's catalog."""
        if message.snapshot_begin:
            self._building = RegistrySnapshot()
        snapshot = self._building if self._building is not None else self._resolver.snapshot
        moved: set[Adapter] = set()
        new: list[Version] = []
        for event in message.events:
            kind = event.WhichOneof("change")
            if kind == "version":
                version = version_from_wire(event.version)
                known = snapshot.version(version.tenant, version.name, version.number)
                if known is None and not version.deleted:
                    new.append(version)
                snapshot.put_version(version)
            elif kind == "tag":
                snapshot.put_tag(registry_wire.tag(event.tag))
                moved.add((event.tag.tenant, event.tag.name.lower()))
        if message.snapshot_end and self._building is not None:
            self._resolver.snapshot, self._building = self._building, None
            self._resolver.on_moves(None)
        elif self._building is None:
            if new:
                self._resolver.on_versions(new)
            if moved:
                self._resolver.on_moves(moved)
        if self._building is None:
            self.resume_token = message.resume_token

    def abandon_snapshot(self) -> None:
        """The stream ended: drop an incomplete snapshot."""
        self._building = None

    def forget_resume_token(self, *, after: LoraplexError) -> None:
        """Drop a refused token; keep it if the registry was merely unavailable."""
        if after.reason != "UNAVAILABLE":
            self.resume_token = ""


def _error_of(error: grpc.RpcError) -> LoraplexError:
    """The error behind a failed call. What the transport says contains the registry's address,
    which the callers of a gateway do not learn."""
    found = from_rpc_error(error)
    if has_details(error) or found.reason != Unavailable.reason:
        return found
    return Unavailable(
        "the registry does not answer; try again",
        reason="REGISTRY_UNAVAILABLE",
        retry_after_s=1.0,
    )
