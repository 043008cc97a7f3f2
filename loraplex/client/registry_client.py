"""The async client of the registry: typed results, typed errors, resumable transfers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

from loraplex.api import registry_wire
from loraplex.api.registry import (
    AdapterDescription,
    AdapterVersion,
    Change,
    Checked,
    Published,
    Resolved,
    Sharing,
    Signed,
    Tag,
    TagMove,
    UsageEntry,
)
from loraplex.api.wire import violations_from_proto
from loraplex.client import settings
from loraplex.client.channel import Channel
from loraplex.client.downloading import download, read_file
from loraplex.client.memory_adapter import header_of, memory_files
from loraplex.client.progress import Progress, ignore_progress
from loraplex.client.publishing import (
    Publication,
    config_and_header,
    files_to_send,
    signatures_of,
)
from loraplex.client.registry_admin import RegistryAdmin
from loraplex.client.sent_files import hash_files
from loraplex.client.settings import Credentials
from loraplex.client.uploading import upload
from loraplex.errors import Violation
from loraplex.model_layout import make_layout
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc

PAGE_SIZE = 500
_SENT_UNCHECKED_BYTES = 8 << 20
"""A smaller adapter is sent without a check beforehand, which would take longer; the registry
checks it on arrival."""


class RegistryClient:
    """Talks to one registry. Use as an async context manager, inside one event loop.

    Methods raise the errors of `loraplex.errors`; Unavailable if no registry answers.
    """

    def __init__(self, address: str | None = None, credentials: Credentials | None = None) -> None:
        """Without `address`, LORAPLEX_REGISTRY_ADDRESS names it.

        Without `credentials`, they come from LORAPLEX_API_KEY (or LORAPLEX_API_KEY_FILE),
        LORAPLEX_CA, LORAPLEX_CERT and LORAPLEX_KEY.
        """
        self._channel = Channel(
            address or settings.registry_address(os.environ),
            credentials or settings.credentials(os.environ),
            "registry",
        )
        self.admin = RegistryAdmin(self._channel)
        """Bases, keys, tenants, audit, garbage collection."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    @property
    def _stub(self) -> registry_pb2_grpc.RegistryServiceStub:
        return self._channel.stub(registry_pb2_grpc.RegistryServiceStub)

    async def upload(
        self, folder: str | Path, publication: Publication, progress: Progress = ignore_progress
    ) -> Published:
        """Publish a PEFT adapter folder as a version; the same content again is the same version.

        Raises:
            InvalidAdapter: the folder was refused; `violations` name the fields.
        """
        options, folder = publication.to_proto(), Path(folder)
        files, left_out = await asyncio.to_thread(files_to_send, folder, publication.strict)
        checksums = await hash_files(files, progress)
        specs = [each.spec for each in checksums]
        options.signatures.extend(signatures_of(publication, folder, specs))
        # Errors in the config or the header are reported before any byte of a large file is sent.
        content = await asyncio.to_thread(config_and_header, files)
        await self._validate(options, specs, *content)
        done = await upload(self._channel, options, files, checksums, progress)
        return _published(done, left_out)

    async def publish(
        self,
        state_dict: Mapping[str, Any],
        config: Any,
        publication: Publication,
        progress: Progress = ignore_progress,
    ) -> Published:
        """Publish an adapter from this process's memory, without files. It is checked as `upload`
        checks a folder, and has the digest of the folder that PEFT would save.

        Args:
            state_dict: tensors of torch by name, as `peft.get_peft_model_state_dict` gives them.
            config: the `PeftConfig`, or what its JSON file would contain.

        Raises:
            InvalidAdapter: it was refused; `violations` name the fields.
        """
        config_file, tensor_file = files = await asyncio.to_thread(memory_files, state_dict, config)
        options = publication.to_proto()
        checksums = await hash_files(files, ignore_progress)
        specs = [each.spec for each in checksums]
        if publication.signing_key is not None or publication.signature is not None:
            options.signatures.extend(signatures_of(publication, Path(), specs))
        if tensor_file.size_bytes > _SENT_UNCHECKED_BYTES:
            await self._validate(options, specs, config_file.content, header_of(tensor_file))
        return _published(await upload(self._channel, options, files, checksums, progress))

    async def check(self, folder: str | Path, publication: Publication) -> Checked:
        """Check an upload without storing anything; returns what it would become. Raises as
        `upload` does."""
        options, folder = publication.to_proto(), Path(folder)
        files, left_out = await asyncio.to_thread(files_to_send, folder, publication.strict)
        specs = [each.spec for each in await hash_files(files, ignore_progress)]
        options.signatures.extend(signatures_of(publication, folder, specs))
        content = await asyncio.to_thread(config_and_header, files)
        answer = await self._validate(options, specs, *content)
        warnings = (*left_out, *violations_from_proto(answer.warnings))
        return Checked(answer.base_id, answer.max_rank, warnings)

    async def _validate(
        self,
        options: pb.PublishOptions,
        specs: Sequence[pb.FileSpec],
        config: bytes,
        header: bytes,
    ) -> pb.ValidateAdapterResponse:
        request = pb.ValidateAdapterRequest(
            options=options, files=specs, adapter_config_json=config, safetensors_header=header
        )
        answer: pb.ValidateAdapterResponse = await self._channel.call(
            self._stub.ValidateAdapter, request
        )
        return answer

    async def get(self, ref: str, split_key: str = "") -> Resolved:
        """The version that a reference names. Raises AdapterNotFound."""
        request = pb.GetAdapterRequest(ref=ref, split_key=split_key)
        answer = await self._channel.call(self._stub.GetAdapter, request)
        tags = tuple(registry_wire.tag(tag) for tag in answer.tags)
        return Resolved(registry_wire.adapter_version(answer.version), tags)

    async def list(
        self,
        *,
        tenant: str = "",
        name: str = "",
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
        base_id: str = "",
        all_versions: bool = False,
    ) -> AsyncIterator[AdapterVersion]:
        """The versions that the caller may see: of each adapter the one that `latest` points at, or
        all."""
        request = pb.ListAdaptersRequest(
            page_size=PAGE_SIZE,
            tenant=tenant,
            name=name,
            name_prefix=name_prefix,
            labels=labels,
            base_id=base_id,
            all_versions=all_versions,
        )
        async for page in self._channel.pages(self._stub.ListAdapters, request):
            for version in page.versions:
                yield registry_wire.adapter_version(version)

    async def pull(
        self,
        ref: str,
        folder: str | Path,
        *,
        force: bool = False,
        progress: Progress = ignore_progress,
    ) -> AdapterVersion:
        """Write the files of a version into `folder`, which must be new or empty unless `force`.

        Raises:
            AlreadyExists: the folder holds files.
            DataLoss: the received bytes are damaged. Nothing is written then.
        """
        return await download(self._channel, ref, Path(folder), force=force, progress=progress)

    async def export(
        self,
        ref: str,
        folder: str | Path,
        *,
        form: str = "modelpack",
        progress: Progress = ignore_progress,
    ) -> tuple[AdapterVersion, str]:
        """Write a version as an OCI image layout; returns it and the manifest's digest.

        Args:
            folder: new or empty; appears complete or not at all.
            form: "modelpack" or "oci".
        """
        digest = ""

        def finish(partial: Path, version: AdapterVersion) -> None:
            nonlocal digest
            digest = make_layout(partial, version, form)

        version = await download(self._channel, ref, Path(folder), progress=progress, finish=finish)
        return version, digest

    async def read_file(self, ref: str, path: str) -> bytes:
        """One small file of a version, such as adapter_config.json."""
        return await read_file(self._channel, ref, path)

    async def set_tag(
        self,
        name: str,
        tag: str,
        targets: Mapping[int | str, int] | Mapping[int, int],
        *,
        expect: str | None = None,
        when_loaded_s: float = 0.0,
        reason: str = "",
    ) -> Tag:
        """Point a tag at versions.

        Args:
            targets: weight by version number or digest; one entry unless the tag is split.
            expect: digest that the tag must point at now, "none" if it must not exist; None = any.
            when_loaded_s: above 0: the tag moves only once gateways have loaded the versions,
                within this time.
            reason: for the audit log.

        Raises:
            Conflict: `expect` does not hold.
            InvalidRequest: the content of a digest was published for several bases.
        """
        request = pb.SetTagRequest(
            name=name,
            tag=tag,
            targets=[
                pb.TagTarget(digest=version, weight=weight)
                if isinstance(version, str)
                else pb.TagTarget(version=version, weight=weight)
                for version, weight in targets.items()
            ],
            expect=expect,
            when_loaded_s=when_loaded_s,
            reason=reason,
        )
        return await self._set_tag(request)

    async def rollback(self, name: str, tag: str, to_version: int = 0) -> Tag:
        """Move a tag back to its previous targets, or to `to_version`."""
        request = pb.SetTagRequest(name=name, tag=tag, rollback=True, rollback_version=to_version)
        return await self._set_tag(request)

    async def delete_tag(self, name: str, tag: str, *, expect: str | None = None) -> Tag:
        """Remove a tag."""
        return await self._set_tag(pb.SetTagRequest(name=name, tag=tag, delete=True, expect=expect))

    async def _set_tag(self, request: pb.SetTagRequest) -> Tag:
        answer = await self._channel.call(self._stub.SetTag, request)
        return registry_wire.tag(answer.tag)

    async def tag_history(self, name: str, tag: str) -> Sequence[TagMove]:
        """The last moves of a tag, newest first."""
        request = pb.ListTagHistoryRequest(name=name, tag=tag)
        answer = await self._channel.call(self._stub.ListTagHistory, request)
        return [registry_wire.tag_move(move) for move in answer.moves]

    async def delete(
        self, ref: str, *, every: bool = False, force: bool = False, purge: bool = False
    ) -> Sequence[AdapterVersion]:
        """Delete one version, or with `every` all versions and tags of the name `ref`.

        Args:
            force: delete a version even if tags point at it, and these tags as well.
            purge: let garbage collection remove the files without waiting for the retention time.

        Raises:
            Blocked: a tag other than `latest` points at it, and `force` is not given.
        """
        request = pb.DeleteAdapterVersionRequest(ref=ref, all=every, force=force, purge=purge)
        answer = await self._channel.call(self._stub.DeleteAdapterVersion, request)
        return [registry_wire.adapter_version(version) for version in answer.deleted]

    async def set_sharing(
        self,
        name: str,
        visibility: str = "",
        *,
        shared_with: Sequence[str] = (),
        pullable: bool | None = None,
    ) -> Sharing:
        """Set which tenants besides the owner may run and download an adapter.

        Args:
            visibility: "private", "shared" or "public"; "" keeps it.
            shared_with: tenants, with "shared".
            pullable: None keeps it.
        """
        request = pb.SetSharingRequest(
            name=name,
            visibility=registry_wire.visibility_number(visibility),
            shared_with=shared_with,
        )
        if pullable is not None:
            request.pullable = pullable
        answer = await self._channel.call(self._stub.SetSharing, request)
        return registry_wire.sharing(name, answer)

    async def describe(
        self,
        name: str,
        description: str | None = None,
        *,
        set_labels: Mapping[str, str] | None = None,
        remove_labels: Sequence[str] = (),
    ) -> AdapterDescription:
        """Change the description and the labels of an adapter, for all its versions.

        Args:
            description: None keeps it, "" removes it.
        """
        request = pb.DescribeAdapterRequest(
            name=name, description=description, set_labels=set_labels, remove_labels=remove_labels
        )
        answer = await self._channel.call(self._stub.DescribeAdapter, request)
        return AdapterDescription(name, answer.description, dict(sorted(answer.labels.items())))

    async def attach_signature(
        self, ref: str, bundle: bytes, public_key: str = ""
    ) -> AdapterVersion:
        """Store a signature (a sigstore bundle over the version's files) with a version.

        Args:
            public_key: PEM of the signer's key, for the registry to verify the bundle by.
        """
        request = pb.AttachSignatureRequest(ref=ref, bundle=bundle, public_key=public_key)
        answer = await self._channel.call(self._stub.AttachSignature, request)
        return registry_wire.adapter_version(answer.version)

    async def signatures(self, ref: str) -> Signed:
        """The version that a reference names, its signatures, and the keys that its tenant
        requires."""
        request = pb.ListSignaturesRequest(ref=ref)
        answer = await self._channel.call(self._stub.ListSignatures, request)
        bundles = {signature.key_sha256: signature.bundle for signature in answer.signatures}
        version = registry_wire.adapter_version(answer.version)
        return Signed(version, bundles, tuple(answer.policy_keys))

    async def usage(
        self, *, tenant: str = "", all_tenants: bool = False, model: str = "", since: str = ""
    ) -> Sequence[UsageEntry]:
        """The usage of a tenant by day and model.

        Args:
            tenant: "" = the caller's own.
            model: tenant/name of an adapter, or the id of a base; "" = all.
            since: first day, as YYYY-MM-DD; "" = the last 30 days.
        """
        request = pb.ListUsageRequest(
            tenant=tenant, all_tenants=all_tenants, model=model, since=since
        )
        answer = await self._channel.call(self._stub.ListUsage, request)
        return [registry_wire.usage_entry(entry) for entry in answer.entries]

    async def watch(self, resume_token: str = "") -> AsyncIterator[Change]:
        """Yield a snapshot, or the changes since `resume_token`, and then every change as it
        happens."""
        request = pb.WatchAdaptersRequest(resume_token=resume_token)
        async with aclosing(self._channel.stream(self._stub.WatchAdapters, request)) as messages:
            async for message in messages:
                for change in registry_wire.changes(message):
                    yield change


def _published(
    done: pb.FinishUploadResponse | pb.PublishAdapterResponse, left_out: Sequence[Violation] = ()
) -> Published:
    version = registry_wire.adapter_version(done.version)
    return Published(version, done.created, (*left_out, *violations_from_proto(done.warnings)))
