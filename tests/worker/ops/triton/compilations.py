"""Counts what Triton compiles, or loads from its cache on disk, which also makes a step wait."""

from contextlib import contextmanager

from triton import knobs


@contextmanager
def counted_compilations():
    """The names of kernels that became ready to launch inside the block, in order. A kernel that
    the process has launched before with the same constants is not among them."""
    names, before = [], knobs.compilation.listener

    def note(*, src, **_):
        names.append(src.fn.__name__ if hasattr(src, "fn") else str(src))

    knobs.compilation.listener = note
    try:
        yield names
    finally:
        knobs.compilation.listener = before
