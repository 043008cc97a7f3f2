"""Downloads adapters from other systems into a folder before an upload, and verifies them.

    hf://ORG/NAME[@REVISION]          a repository of the Hugging Face hub
    s3://BUCKET[/PREFIX]              objects under a prefix
    oci://HOST[:PORT]/REPOSITORY[:TAG|@sha256:HEX]   an artifact in an OCI registry

Only files that an adapter may have are fetched, each within the size limit of an upload.
"""

from __future__ import annotations

from pathlib import Path

from loraplex.client.progress import Progress, ignore_progress
from loraplex.errors import InvalidRequest, Violation

SCHEMES = ("hf", "s3", "oci")


def is_remote(source: str) -> bool:
    """Whether the source of an upload is an address rather than a folder."""
    return "://" in source


def fetch(
    source: str, folder: Path, *, pickled: bool, progress: Progress = ignore_progress
) -> tuple[Violation, ...]:
    """Download an adapter into an empty folder; returns warnings about what was left out.

    Args:
        source: address of one of the forms above.
        folder: an empty folder. After an error, its content must not be used.
        pickled: whether `adapter_model.bin` is accepted if there are no safetensors.

    Raises:
        InvalidRequest: the address has another form.
        InvalidAdapter: a file is missing or too large.
        NotFound, PermissionDenied, Unavailable: the source reports this, or does not answer.
        DataLoss: the received bytes do not match the digest or size that the source states.
        Unsupported: a required package is not installed.
    """
    scheme, _, address = source.partition("://")
    if scheme == "hf":
        from loraplex.sources.hub import fetch_from_hub

        return fetch_from_hub(address, folder, pickled, progress)
    if scheme == "s3":
        from loraplex.sources.bucket import fetch_from_bucket

        return fetch_from_bucket(address, folder, pickled, progress)
    if scheme == "oci":
        from loraplex.sources.oci import fetch_from_registry

        return fetch_from_registry(address, folder, progress)
    description = f"must be a folder, or begin with {', '.join(f'{s}://' for s in SCHEMES)}"
    raise InvalidRequest.field("DIR", source, description)
