"""The keys of all objects that gateways store.

files/<tenant>/documents/<file id>.json        what a file is; it exists as long as this does
files/<tenant>/contents/<file id>/<%06d>       its bytes, in segments of one size
"""

from __future__ import annotations

import re

FILES = "files/"
_FILE_ID = re.compile(r"file-[0-9a-z]{26}")


def is_file_id(text: str) -> bool:
    """Whether it may be a part of a key."""
    return _FILE_ID.fullmatch(text) is not None


def file_documents(tenant: str) -> str:
    """Prefix of what a tenant's files are."""
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


def id_of_document(key: str) -> str:
    """The id of the file or batch that a document describes."""
    return key.rpartition("/")[2].removesuffix(".json")
