"""The compiled kernels as test parameters: one for each instruction set, skipped where missing."""

import pytest

from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.native.build import BuildFailed, build_library
from loraplex_services.worker.native.isa import ISA_FLAGS, host_isas


def _marks(isa: str) -> list[pytest.MarkDecorator]:
    if isa not in host_isas():
        return [pytest.mark.skip(f"this processor lacks {isa}")]
    # Chosen by nobody: it shows the logic of sixteen lanes where there are none.
    return [pytest.mark.long] if isa == "generic" else []


ISAS = [pytest.param(isa, marks=_marks(isa)) for isa in ISA_FLAGS]


def native(isa: str) -> Native:
    """The library with two threads, so that tasks really run next to each other."""
    try:
        library = Native(isa, build_library(isa))
    except BuildFailed as error:
        pytest.skip(str(error))
    library.set_threads(2)
    return library
