"""The compiled kernels as test parameters: one for each instruction set of this machine's family,
skipped where the processor lacks it.

`make test` takes the two best levels of a machine, and `make test-long` the others, too: compiling
one takes more than ten seconds.
"""

import contextlib
from collections.abc import Iterator

import pytest

from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.native.build import build_library, find_compiler
from loraplex_services.worker.native.isa import LEVELS, family_isas, host_isas


def _marks(isa: str) -> list[pytest.MarkDecorator]:
    if isa not in host_isas():
        return [pytest.mark.skip(f"this processor lacks {isa}")]
    return [] if isa in host_isas()[:2] else [pytest.mark.long]


ISAS = [pytest.param(isa, marks=_marks(isa)) for isa in family_isas()]
PAIRED = [
    pytest.param((isa, True), marks=_marks(isa), id=f"{isa}-pairs")
    for isa in family_isas()
    if LEVELS[isa].half_wins
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
