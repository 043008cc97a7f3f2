"""Which instruction sets a machine is found to have."""

import os
import platform
import sys

import pytest

from loraplex_services.common.settings.env import CPU_ISA
from loraplex_services.worker.native import isa

BF16 = 1 << 14


@pytest.fixture
def pretend(monkeypatch):
    """Be a machine of another kind, whose system gives these bits of AT_HWCAP2."""

    def machine(name, hwcap2=0):
        monkeypatch.setattr(platform, "machine", lambda: name)
        monkeypatch.setattr(isa, "_auxiliary_value", lambda key: hwcap2 if key == 26 else 0)
        isa.cpu_flags.cache_clear()

    yield machine
    isa.cpu_flags.cache_clear()


@pytest.mark.parametrize(
    ("hwcap2", "levels"),
    [
        (BF16, ("neon_bf16", "neon")),
        (~BF16, ("neon",)),
        (0, ("neon",)),
    ],
    ids=["bf16", "all-but-bf16", "nothing"],
)
def test_aarch64_has_neon_and_the_system_says_whether_it_has_bfloat16(pretend, hwcap2, levels):
    pretend("aarch64", hwcap2)
    assert isa.host_isas() == levels
    assert isa.choose_isa("auto") == levels[0]
    assert isa.half_is_fast("auto") == ("neon_bf16" in levels)
    assert isa.family_isas() == ("neon_bf16", "neon")


@pytest.mark.parametrize("name", ["arm64", "riscv64", ""])
def test_torch_computes_on_a_machine_without_kernels_of_its_own(pretend, name):
    pretend(name, BF16)
    assert isa.host_isas() == ()
    assert isa.choose_isa("auto") == "torch"
    assert not isa.half_is_fast("auto")
    assert isa.family_isas() == ()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this vector")
def test_the_system_tells_what_was_asked_for():
    page_size, no_such_key = 6, 999
    assert isa._auxiliary_value(page_size) == os.sysconf("SC_PAGE_SIZE")
    assert isa._auxiliary_value(no_such_key) == 0


@pytest.mark.parametrize("level", isa.LEVELS)
def test_a_setting_can_ask_for_every_level(level):
    assert CPU_ISA.read({"LORAPLEX_CPU_ISA": level}) == level
