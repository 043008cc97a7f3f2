"""Where `registry upload` gets an adapter's folder from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def adapter_folder(source: str, *, convert: bool) -> Iterator[Path]:
    """A folder that can be uploaded, for as long as the context lasts.

    Args:
        source: a folder.
        convert: whether weights in `adapter_model.bin` are made safetensors of first.
    """
    with ExitStack() as stack:
        folder = Path(source)
        if convert:
            from loraplex.rewriting.pickled import from_pickle, is_pickled

            if is_pickled(folder):
                scratch = Path(stack.enter_context(_scratch()))
                from_pickle(folder, scratch / "converted")
                folder = scratch / "converted"
        yield folder


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="loraplex-upload-")
