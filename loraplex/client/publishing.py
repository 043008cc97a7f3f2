"""The options of an upload, its signatures, and the files of a folder that it consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.adapter_format import CONFIG_FILE, TENSOR_FILE, AdapterFolder, File
from loraplex.adapter_format.files import check_files
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.folder import file_names, hub_blob, left_out, read_config, read_files
from loraplex.adapter_format.safetensors_header import read_prefix
from loraplex.client.sent_files import LocalFile
from loraplex.errors import NOTE, DataLoss, InvalidAdapter, InvalidRequest, Violation
from loraplex.model_layout import is_layout, layout_files
from loraplex.refs import check_tag, parse_name
from loraplex.signature_bundle import MAX_BUNDLE_BYTES, SIGNATURE_FILE
from loraplex.signing import sign
from loraplex.units import counted
from loraplex.v1 import registry_pb2 as pb

_MAX_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Publication:
    """Options of one upload."""

    name: str
    """`[tenant/]name`."""
    tags: Sequence[str] = ()
    """Tags that move to the new version in addition to `latest`."""
    latest: bool = True
    """Whether `latest` moves."""
    base_id: str = ""
    """Empty = the base that the adapter's config names, else the only known base."""
    public: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    """Turn warnings into refusals."""
    allow_missing: bool = False
    """Accept an adapter without tensors for some modules that its config selects."""
    parent: str = ""
    """Reference of the version from which this one was made; "" = none."""
    when_loaded_s: float = 0.0
    """Above 0: tags move only once gateways have loaded the version, within this time."""
    keep_versions: int = 0
    """Above 0: the version is an update, and only this many of the newest updates are kept."""
    ttl_s: float = 0.0
    """Above 0: an ephemeral version, deleted this many seconds after its publication."""
    signing_key: Path | None = None
    """PEM of an EC private key to sign the files with."""
    signature: Path | None = None
    """A bundle of `model_signing` over the files; default: the folder's model.sig, if any."""

    def to_proto(self) -> pb.PublishOptions:
        """The message of these options. Raises InvalidRequest for invalid names and tags."""
        parse_name(self.name)
        for tag in self.tags:
            check_tag(tag)
        return pb.PublishOptions(
            name=self.name,
            tags=self.tags,
            no_latest=not self.latest,
            base_id=self.base_id,
            visibility=pb.VISIBILITY_PUBLIC if self.public else pb.VISIBILITY_UNSPECIFIED,
            labels=self.labels,
            strict=self.strict,
            allow_missing=self.allow_missing,
            parent=self.parent,
            when_loaded_s=self.when_loaded_s,
            keep_versions=self.keep_versions,
            ttl_s=self.ttl_s,
        )


def signatures_of(
    publication: Publication, folder: Path, specs: Sequence[pb.FileSpec]
) -> list[pb.Signature]:
    """The signature of the files: made with the given key, the given bundle, or the folder's own.

    Raises:
        InvalidRequest: key or bundle cannot be read.
    """
    if publication.signing_key is not None:
        files = {spec.path: spec.sha256 for spec in specs}
        bundle, public = sign(publication.name, files, publication.signing_key)
        return [pb.Signature(bundle=bundle, public_key=public)]
    path = publication.signature
    if path is None:
        path = folder / SIGNATURE_FILE
        if not path.is_file():
            return []
    try:
        with path.open("rb") as file:  # A longer one than allowed is refused by the registry.
            return [pb.Signature(bundle=file.read(MAX_BUNDLE_BYTES + 1))]
    except OSError as error:
        description = f"cannot be read: {error.strerror}"
        raise InvalidRequest.field("--signature", str(path), description) from None


def local_files(folder: Path) -> list[LocalFile]:
    """The files of an adapter: of a PEFT folder, a hub cache's snapshot, or an OCI image layout.

    Raises InvalidAdapter naming files that may not be in it, or are too large.
    """
    if is_layout(folder):
        files = layout_files(folder)
        findings = Findings()
        check_files([File(f.path, f.size_bytes, f.sha256) for f in files], findings)
        findings.raise_if_refused()
        return files
    places = {name: hub_blob(folder / name) or folder / name for name in file_names(folder)}
    return [LocalFile(name, place, place.stat().st_size) for name, place in places.items()]


def files_to_send(folder: Path, strict: bool) -> tuple[list[LocalFile], tuple[Violation, ...]]:
    """The files of an adapter, and notes and warnings about what is left out. Raises as
    `local_files` and `left_behind` do."""
    return local_files(folder), left_behind(folder, strict=strict)


def left_behind(folder: Path, *, strict: bool) -> tuple[Violation, ...]:
    """Describe what is in a folder and is not uploaded: one note about all files of a training run,
    and a warning about each further adapter.

    Raises:
        InvalidAdapter: there is a further adapter, and `strict` is set.
    """
    if is_layout(folder):
        return ()
    found = left_out(folder)
    if strict and found.warnings:
        raise InvalidAdapter.of(found.warnings)
    return (*_notes(folder, found.names), *found.warnings)


def _notes(folder: Path, names: Sequence[str]) -> tuple[Violation, ...]:
    if not names:
        return ()
    shown = ", ".join(names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")
    count = counted(len(names), "entry", "entries")
    description = f"left out {count} of {folder} that decoding does not need: {shown}"
    return (Violation.of(NOTE, "", description),)


def read_adapter(folder: Path) -> AdapterFolder:
    """Read and hash the files of an adapter, for a check on this machine.

    Raises:
        InvalidAdapter: files are missing, or of a refused kind or size.
        DataLoss: a blob of a layout does not match its digest.
    """
    files = local_files(folder)
    content = read_files({file.path: file.location for file in files})
    hashed = {file.path: file.sha256 for file in content.files}
    for file in files:
        if file.sha256 not in ("", hashed[file.path]):
            raise DataLoss(f"{file.path}: {file.location} is damaged")
    return content


def config_and_header(files: Sequence[LocalFile]) -> tuple[bytes, bytes]:
    """The bytes that validation reads: adapter_config.json and the start of the tensor file. They
    are empty if the file is missing, which validation reports.
    """
    where = {file.path: file.location for file in files}
    config, tensors = where.get(CONFIG_FILE), where.get(TENSOR_FILE)
    return (
        read_config(where) if config else b"",
        read_prefix(tensors) if tensors else b"",
    )
