"""The compiled kernels as test parameters: one for each instruction set, skipped where missing.

`make test` takes the two best levels of a machine, and `make test-long` the others, too: compiling
one takes more than ten seconds.
"""

import pytest

from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.native.build import build_library, find_compiler
from loraplex_services.worker.native.isa import ISA_FLAGS, host_isas


def _marks(isa: str) -> list[pytest.MarkDecorator]:
    if isa not in host_isas():
        return [pytest.mark.skip(f"this processor lacks {isa}")]
    return [] if isa in host_isas()[:2] else [pytest.mark.long]


ISAS = [pytest.param(isa, marks=_marks(isa)) for isa in ISA_FLAGS]


def native(isa: str) -> Native:
    """The library with two threads, so that tasks really run next to each other.

    Sources that do not compile fail the test: only a missing compiler skips it.
    """
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    library = Native(isa, build_library(isa))
    library.set_threads(2)
    return library
