"""Adapters from the Hugging Face hub, or from the server in HF_ENDPOINT, through the hub's own
client.

HF_TOKEN, HF_ENDPOINT and the token of `hf auth login` work as everywhere. A revision is resolved to
its commit first, so that all files are of one commit, and each file is compared with the digest
that the hub lists for it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loraplex.client.progress import Progress
from loraplex.errors import (
    DataLoss,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
    Violation,
)
from loraplex.sources.selection import select

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_CHUNK_BYTES = 1 << 20
WRONG_ANSWERS = (json.JSONDecodeError, UnicodeError, AttributeError, LookupError, TypeError)
"""Errors of the hub's client for an answer that is not JSON, or not of the hub's form."""


def fetch_from_hub(
    address: str, folder: Path, pickled: bool, progress: Progress
) -> tuple[Violation, ...]:
    """See `sources.fetch`. `address` is `ORG/NAME[@REVISION]`."""
    repository, _, revision = address.partition("@")
    if not _REPOSITORY.fullmatch(repository):
        raise InvalidRequest.field("DIR", f"hf://{address}", "must be hf://ORG/NAME[@REVISION]")
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError:
        raise Unsupported.without("huggingface-hub") from None
    api = HfApi()
    with _typed_errors(address):
        info = api.model_info(repository, revision=revision or None, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings or ()}
    names, warnings = select({name: files[name].size or 0 for name in files}, pickled=pickled)
    for name in names:
        with _typed_errors(address):
            path = hf_hub_download(
                repository, name, revision=info.sha, local_dir=folder, endpoint=api.endpoint,
                token=api.token, tqdm_class=_bar_of(name, files[name].size or 0, progress),
            )  # fmt: skip
        _verify(name, Path(path), files[name])
    return warnings


def _bar_of(name: str, size: int, progress: Progress) -> Any:
    """A progress bar for the hub's client that draws ours, and stops downloads that exceed their
    size."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self.done_bytes = int(options.get("initial") or 0)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.done_bytes += int(n or 0)
            if self.done_bytes > size:
                raise DataLoss(f"{name}: more than the {size} bytes that were announced")
            progress(f"fetch {name}", self.done_bytes, size)

    return Bar


def _verify(name: str, path: Path, listed: Any) -> None:
    """Compare a file with the digest of its commit: sha256 with LFS and Xet, else git's own."""
    digest = hashlib.sha256()
    if listed.lfs is None:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    expected = listed.lfs.sha256 if listed.lfs is not None else listed.blob_id
    if digest.hexdigest() != expected:
        raise DataLoss(f"{name}: its digest differs from the one that the hub lists; try again")


@contextmanager
def _typed_errors(address: str) -> Iterator[None]:
    from huggingface_hub import errors

    source = f"hf://{address}"
    try:
        yield
    except errors.GatedRepoError as error:
        description = "is gated: accept its terms on the hub, and set HF_TOKEN"
        raise PermissionDenied(f"{source} {description}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        description = "is not on the hub, or is private: check the name, or set HF_TOKEN"
        raise NotFound(f"{source} {description}") from error
    except errors.RemoteEntryNotFoundError as error:
        raise NotFound(f"{source} lost a file while it was read; try again") from error
    except errors.HFValidationError as error:
        raise InvalidRequest.field(
            "DIR", source, "is not a valid name of a hub repository"
        ) from error
    except (errors.HTTPError, OSError, *WRONG_ANSWERS) as error:  # type: ignore[attr-defined]
        problem = f"cannot be reached, or gave an unexpected answer: {error}"
        raise Unavailable(f"{source}: the hub {problem}") from error
