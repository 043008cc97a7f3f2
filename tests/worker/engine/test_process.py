"""What the engine's process takes from its environment."""

import logging
import socket

import msgspec
import pytest

from loraplex_services.worker.config import from_env
from loraplex_services.worker.engine import process
from loraplex_services.worker.engine.process import ServerSocket, build_engine
from loraplex_services.worker.native.isa import TORCH
from loraplex_services.worker.types.messages import (
    Cancel,
    FrameBuffer,
    StepInput,
    decode_message,
    frame,
)
from tests.worker.commands import make_config
from tests.worker.native.isas import ISAS, native
from tests.worker.tiny import write_base


@pytest.mark.parametrize("isa", [*ISAS, TORCH])
def test_the_environment_forces_an_instruction_set_and_the_log_says_so(isa, tmp_path, caplog):
    if isa != TORCH:
        native(isa)  # skips without a compiler
    caplog.set_level(logging.INFO)
    base = write_base(tmp_path / "base")
    environ = {
        "LORAPLEX_CPU_ISA": isa,
        "LORAPLEX_MODEL": str(base),
        "LORAPLEX_OBJECTS": "file:///objects",
        "LORAPLEX_KV_MEMORY": "4MiB",
        "LORAPLEX_DTYPE": "float32",
    }
    config = from_env(environ).engine
    engine = build_engine(msgspec.structs.replace(config, model_dir=str(base)))
    assert engine.ready.info.kernels == isa
    assert [m for m in caplog.messages if m.startswith("cpu kernels")][-1] == f"cpu kernels: {isa}"


def test_an_error_that_nothing_foresees_refuses_the_base_and_one_that_may_pass_does_not(
    monkeypatch, tmp_path
):
    """Another engine would end as the first, so that the stack would start them for minutes."""

    def refusal(error):
        def fail(config):
            raise error

        monkeypatch.setattr(process, "build_engine", fail)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(frame(make_config(model_dir=str(tmp_path))))
            code = process._serve(ServerSocket(theirs))
            [body] = FrameBuffer().feed(ours.recv(1 << 16))
        return code, decode_message.decode(body).error.to_error()

    code, refused = refusal(KeyError("rope"))
    assert code == 3 and "KeyError: 'rope'" in refused.message
    with pytest.raises(MemoryError):
        refusal(MemoryError())


def test_a_wake_up_is_no_quiet_time():
    """The end of a copy wakes the engine. It checks its integrity only when nothing comes, because
    that takes longer the more adapters and pages it has."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = ServerSocket(theirs)
        assert server.commands(0.0) is None
        server.wake()
        assert server.commands(None) == []
        assert server.commands(0.0) is None
        ours.sendall(frame(StepInput([Cancel("r1")])))
        assert server.commands(None) == [Cancel("r1")]
