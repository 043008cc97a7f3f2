"""The sources from which `registry upload` gets an adapter's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def adapter_folder(
    source: str, *, convert: bool, text_only: bool, strict: bool, base: str = ""
) -> Iterator[Path]:
    """A folder that can be uploaded, for as long as the context lasts.

    Args:
        source: a folder, or an address that `loraplex.sources` knows.
        convert: whether adapters in other formats are converted to a PEFT LoRA first.
        text_only: whether LoRA on vision and audio towers is left out.
        strict: whether files that would be left out are refused.
        base: the base, as a folder or an id; "" = the one that the adapter names.

    Raises:
        Unsupported: a package is missing that the source or the conversion needs.
    """
    from loraplex.sources import is_remote

    if convert or text_only:
        require_numpy()
    with ExitStack() as stack:
        folder = Path(source)
        if is_remote(source) or convert or text_only:
            scratch = Path(stack.enter_context(_scratch()))
        if is_remote(source):
            folder = scratch / "fetched"
            folder.mkdir()
            _fetch(source, folder, convert=convert, strict=strict)
        if convert:
            folder = _converted(folder, scratch, base)
        if text_only:
            from loraplex.rewriting.respelling import text_only as without_towers

            if without_towers(folder, scratch / "text"):
                folder = scratch / "text"
        yield folder


def require_numpy() -> None:
    """Raises Unsupported if numpy is missing, which all that rewrites adapters needs."""
    from importlib.util import find_spec

    from loraplex.errors import Unsupported

    if find_spec("numpy") is None:
        raise Unsupported.without("numpy")


def _converted(folder: Path, scratch: Path, base: str) -> Path:
    """Convert the content of a folder to a PEFT LoRA; the folder itself if it is one already."""
    import os

    from loraplex.cli.local_base import base_folder, found_base
    from loraplex.rewriting.other_methods import is_other_method, named_base, to_lora
    from loraplex.rewriting.pickled import from_pickle, is_pickled
    from loraplex.rewriting.respelling import from_tinker, is_tinker

    if is_pickled(folder):
        from_pickle(folder, scratch / "unpickled")
        folder = scratch / "unpickled"
    if is_other_method(folder):
        # `--base` is the id under which the base is served, which often says nothing about where
        # its files are on this machine; the adapter itself names what it was trained on.
        found = found_base(base, os.environ) or base_folder(named_base(folder) or base, os.environ)
        to_lora(folder, scratch / "lora", found)
        return scratch / "lora"
    if is_tinker(folder):
        from_tinker(folder, scratch / "peft")
        return scratch / "peft"
    return folder


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
