"""A child of the API server process that verifies and packs adapters.

Untrusted files are parsed here, and neither on the API server's event loop nor in the engine. Jobs
come on stdin and answers leave on stdout, as lines of JSON; the first line describes the base.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import msgspec

from loraplex.adapter_format.safetensors_header import TENSOR_FILE
from loraplex.errors import DataLoss, LoraplexError, Unavailable
from loraplex_services.worker.adapters.pack.image import ImageFile, image_path, images_in
from loraplex_services.worker.adapters.pack.pack_messages import (
    DAMAGED_IMAGE,
    PackJob,
    PackSetup,
    Prepared,
)
from loraplex_services.worker.adapters.pack.packing import NeedsBase, Packer
from loraplex_services.worker.types.messages import WireError


def main() -> None:
    """Answer every line until stdin closes."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=PackSetup)
    packer = Packer(setup.geometry, setup.layout)
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=PackJob)
        try:
            answer = Prepared(prepare(Path(job.folder), job.sha256, packer))
        except LoraplexError as error:
            answer = Prepared(error=WireError.of(error))
        except OSError as error:
            gone = Unavailable(f"the adapter could not be packed: {error.strerror}")
            answer = Prepared(error=WireError.of(gone))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def prepare(folder: Path, sha256: str, packer: Packer) -> int:
    """Verify the images of all ranks, or make them from the verified file. Returns the pages of the
    largest, or 0.

    A damaged image is renamed and made again.

    Raises:
        DataLoss: the tensor file is damaged, or deleted and the image is damaged.
        InvalidAdapter: not for this base, over the rank limit, or not finite.
    """
    counts = [_num_pages(folder, fingerprint) for fingerprint in packer.fingerprints]
    if all(counts):
        return max(counts)
    paths = [image_path(folder, fingerprint) for fingerprint in packer.fingerprints]
    for other in set(images_in(folder)).difference(paths):
        other.unlink()
    try:
        tensors = (folder / TENSOR_FILE).open("rb")
    except FileNotFoundError:
        raise DataLoss("the disk cache has neither a good image nor the tensors") from None
    with tensors as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256.removeprefix("sha256:"):
            raise DataLoss(f"{TENSOR_FILE} does not match its sha256 {sha256}")
    try:
        return packer.write(folder)
    except NeedsBase:
        return 0


def _num_pages(folder: Path, fingerprint: str) -> int:
    """Pages of a good image; 0 = there is none. A damaged one is renamed."""
    path = image_path(folder, fingerprint)
    try:
        with ImageFile(path) as image:
            image.check(fingerprint)
            return image.index.num_pages
    except FileNotFoundError:
        return 0
    except DataLoss:
        os.replace(path, folder / DAMAGED_IMAGE)
        return 0


if __name__ == "__main__":
    main()
