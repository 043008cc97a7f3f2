"""The keys of all objects that gateways store.

files/<tenant>/documents/<file id>.json        what a file is; it exists as long as this does
files/<tenant>/contents/<file id>/<%06d>       its bytes, in segments of one size
batches/<tenant>/documents/<batch id>.json     what a batch job is and how far it is
batches/<tenant>/results/<batch id>/<%06d>     the result of one line, until the batch job has ended
batches/<tenant>/results/<batch id>/skipped    the lines that get none, until then
unfinished-batches/<tenant>/<batch id>         marks a batch job that has not ended
"""

from __future__ import annotations

import re

FILES = "files/"
BATCHES = "batches/"
UNFINISHED = "unfinished-batches/"
_BATCH_ID = re.compile(r"batch_[0-9a-z]{26}")
_FILE_ID = re.compile(r"file-[0-9a-z]{26}")


def is_file_id(text: str) -> bool:
    """Whether it may be a part of a key."""
    return _FILE_ID.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    """Whether it may be a part of a key."""
    return _BATCH_ID.fullmatch(text) is not None


def file_documents(tenant: str) -> str:
    """Prefix of the documents of a tenant's files."""
    return f"{FILES}{tenant}/documents/"


def file_document(tenant: str, file_id: str) -> str:
    return f"{file_documents(tenant)}{file_id}.json"


def contents(tenant: str) -> str:
    """Prefix of the bytes of a tenant's files."""
    return f"{FILES}{tenant}/contents/"


def segments(tenant: str, file_id: str) -> str:
    """Prefix of the bytes of one file."""
    return f"{contents(tenant)}{file_id}/"


def segment(tenant: str, file_id: str, index: int) -> str:
    return f"{segments(tenant, file_id)}{index:06d}"


def batch_documents(tenant: str) -> str:
    """Prefix of the documents of a tenant's batch jobs."""
    return f"{BATCHES}{tenant}/documents/"


def batch_document(tenant: str, batch_id: str) -> str:
    return f"{batch_documents(tenant)}{batch_id}.json"


def results(tenant: str, batch_id: str) -> str:
    """Prefix of the results of one batch job."""
    return f"{BATCHES}{tenant}/results/{batch_id}/"


def result(tenant: str, batch_id: str, index: int) -> str:
    return f"{results(tenant, batch_id)}{index:06d}"


def skipped(tenant: str, batch_id: str) -> str:
    return f"{results(tenant, batch_id)}skipped"


def unfinished_of(tenant: str) -> str:
    """Prefix of a tenant's unfinished batch jobs."""
    return f"{UNFINISHED}{tenant}/"


def unfinished(tenant: str, batch_id: str) -> str:
    return f"{unfinished_of(tenant)}{batch_id}"


def id_of_document(key: str) -> str:
    """The id of the file or batch job that a document describes."""
    return key.rpartition("/")[2].removesuffix(".json")
