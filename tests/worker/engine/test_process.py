"""What the engine's process takes from its environment."""

import logging

import pytest

from loraplex_services.worker.engine.process import build_engine
from loraplex_services.worker.native.isa import TORCH
from tests.worker.commands import make_config
from tests.worker.native.isas import ISAS, native
from tests.worker.tiny import write_base

ARENA_BYTES = 4 << 20


@pytest.mark.parametrize("isa", [*ISAS, TORCH])
def test_the_environment_forces_an_instruction_set_and_the_log_says_so(
    isa, monkeypatch, tmp_path, caplog
):
    if isa != TORCH:
        native(isa)  # skips without a compiler
    monkeypatch.setenv("LORAPLEX_CPU_ISA", isa)
    caplog.set_level(logging.INFO)
    base = write_base(tmp_path / "base")
    engine = build_engine(make_config(model_dir=str(base), arena_bytes=ARENA_BYTES))
    assert engine.ready.info.kernels == isa
    assert [m for m in caplog.messages if m.startswith("cpu kernels")][-1] == f"cpu kernels: {isa}"
