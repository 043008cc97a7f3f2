"""The compiled kernels as test parameters: one for each instruction set of this processor.

`make test` takes the two best levels of a machine, and `make test-long` the others, too: compiling
one takes more than ten seconds.
"""

import contextlib
from collections.abc import Iterator

import pytest

from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.native.build import build_library, find_compiler
from loraplex_services.worker.native.isa import LEVELS, host_isas

_MARKS = {isa: [pytest.mark.long] * (rank >= 2) for rank, isa in enumerate(host_isas())}
ISAS = [pytest.param(isa, marks=marks) for isa, marks in _MARKS.items()]
PAIRED = [
    pytest.param((isa, True), marks=marks, id=f"{isa}-pairs")
    for isa, marks in _MARKS.items()
    if LEVELS[isa].has_dot_products
]
"""The levels with dot products of bfloat16 pairs, for `native_choosing`."""


def native(isa: str) -> Native:
    """The library with two threads, so that tasks really run next to each other.

    Sources that do not compile fail the test: only a missing compiler skips it.
    """
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    library = Native(isa, build_library(isa))
    library.set_threads(2)
    return library


@contextlib.contextmanager
def native_choosing(path: str | tuple[str, bool]) -> Iterator[Native]:
    """The library of a parameter of `ISAS` without dot products of pairs where there is a choice,
    or of `PAIRED` with them, whichever this processor does faster."""
    isa, in_pairs = (path, False) if isinstance(path, str) else path
    library = native(isa)
    assert library.choose_pairs(in_pairs) == in_pairs
    yield library
    library.choose_pairs(None)
