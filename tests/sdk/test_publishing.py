"""Folders that their owner changes or fills while somebody else uploads them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from loraplex.client.progress import ignore_progress
from loraplex.client.publishing import Publication, local_files, signatures_of
from loraplex.client.sent_files import hash_files
from loraplex.errors import DataLoss, InvalidAdapter
from loraplex.signature_bundle import MAX_BUNDLE_BYTES
from tests.adapter_format.builders import write

pytestmark = pytest.mark.hostile
TOO_MUCH = 1 << 40
"""More bytes than the machine has memory for."""


async def test_a_file_that_became_a_link_after_the_folder_was_listed_is_not_read(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (write(folder) / "README.md").write_text("mine")
    files = local_files(folder)
    (tmp_path / "secret").write_text("of the machine")
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(tmp_path / "secret")
    with pytest.raises(DataLoss, match="it has changed since"):
        await hash_files(files, ignore_progress)


def test_no_more_of_a_signature_is_read_than_one_may_have(tmp_path: Path) -> None:
    (tmp_path / "model.sig").touch()
    os.truncate(tmp_path / "model.sig", TOO_MUCH)
    [signature] = signatures_of(Publication("a"), tmp_path, ())
    assert len(signature.bundle) == MAX_BUNDLE_BYTES + 1


def test_a_blob_of_a_layout_beyond_the_limit_of_its_file_is_refused_unread(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (blobs / ("0" * 64)).touch()
    os.truncate(blobs / ("0" * 64), TOO_MUCH)
    named = {"org.opencontainers.image.title": "adapter_config.json"}
    layer = {"digest": "sha256:" + "0" * 64, "size": TOO_MUCH, "annotations": named}
    manifest = json.dumps({"layers": [layer]}).encode()
    sha256 = hashlib.sha256(manifest).hexdigest()
    (blobs / sha256).write_bytes(manifest)
    (tmp_path / "index.json").write_text(
        json.dumps({"manifests": [{"digest": f"sha256:{sha256}"}]})
    )
    (tmp_path / "oci-layout").write_text("{}")
    with pytest.raises(InvalidAdapter, match="must have 1 to 1048576 bytes"):
        local_files(tmp_path)
