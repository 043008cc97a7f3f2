"""Where `registry upload` gets an adapter's folder from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def adapter_folder(source: str, *, convert: bool, strict: bool) -> Iterator[Path]:
    """A folder that can be uploaded, for as long as the context lasts.

    Args:
        source: a folder, or an address that `loraplex.sources` knows.
        convert: whether weights in `adapter_model.bin` are made safetensors of first.
        strict: whether files that would be left out are refused.
    """
    from loraplex.sources import is_remote

    with ExitStack() as stack:
        folder = Path(source)
        if is_remote(source) or convert:
            scratch = Path(stack.enter_context(_scratch()))
        if is_remote(source):
            folder = scratch / "fetched"
            folder.mkdir()
            _fetch(source, folder, convert=convert, strict=strict)
        if convert:
            from loraplex.rewriting.pickled import from_pickle, is_pickled

            if is_pickled(folder):
                from_pickle(folder, scratch / "converted")
                folder = scratch / "converted"
        yield folder


def _fetch(source: str, folder: Path, *, convert: bool, strict: bool) -> None:
    from loraplex.cli.output import print_warnings
    from loraplex.cli.progress import ProgressBar
    from loraplex.errors import InvalidAdapter
    from loraplex.sources import fetch

    with ProgressBar(source) as bar:
        warnings = fetch(source, folder, pickled=convert, progress=bar)
    if strict and warnings:
        raise InvalidAdapter.of(warnings)
    print_warnings(warnings)


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="loraplex-upload-")
