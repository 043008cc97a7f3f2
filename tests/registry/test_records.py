"""Records as JSON: complete in the object store, without defaults in the index."""

from __future__ import annotations

import dataclasses

import pytest

from loraplex.adapter_format import File
from loraplex.api.registry import TagTarget
from loraplex_services.registry.records import (
    AdapterRecord,
    TagRecord,
    VersionRecord,
    build,
    to_set_fields,
)

VERSION = VersionRecord("acme", "sql", 1, "sha256:0", "base", "sha256:1", 1.0, (File("a", 1, "2"),))
TAG = TagRecord("acme", "sql", "prod", (TagTarget(1, "sha256:0", 1),), 3, 1.0)
RECORDS = [
    VERSION,
    dataclasses.replace(
        VERSION, labels={"team": "a"}, generation=2, eos_token_ids=(7,), purged=True
    ),
    TAG,
    dataclasses.replace(TAG, targets=(), pending=TAG.targets, pending_until_s=2.0),
    AdapterRecord("acme", "sql", 1),
    AdapterRecord("acme", "sql", 2, ("other",), pullable=True, generation=4),
]


@pytest.mark.parametrize("record", RECORDS)
def test_what_the_index_keeps_is_the_whole_record(record: object) -> None:
    assert build(type(record), to_set_fields(record)) == record


def test_the_index_keeps_no_default_but_the_generation() -> None:
    required = {"tenant", "name", "version", "digest", "base_id", "base_fingerprint"}
    assert set(to_set_fields(VERSION)) == required | {"created_s", "files", "generation"}
