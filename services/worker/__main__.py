"""`python -m loraplex_services.worker`: one worker, which starts its engine process."""

from __future__ import annotations

import importlib.util
import os
import sys

from loraplex.errors import InvalidRequest
from loraplex_services.common.processes.event_loop import new_loop
from loraplex_services.common.processes.process import run_service


async def _serve() -> None:
    # Loaded only now: --help must not wait for them.
    from loraplex_services.worker.config import from_env
    from loraplex_services.worker.server.engine_client import EngineClient

    config = from_env(os.environ)
    _check_torch()
    client = EngineClient(step_timeout_s=config.step_timeout_s)
    if not config.node_rank:
        await client.start()
    try:
        # The engine process imports torch while this one imports gRPC.
        from loraplex_services.worker.server.serving import serve

        await serve(config, client)
    finally:
        await client.stop()


def _check_torch() -> None:
    """Raises InvalidRequest if torch is not installed. Only the engine process imports it, so
    without this check every engine would end at its start."""
    if importlib.util.find_spec("torch") is None:
        raise InvalidRequest(
            "torch is not installed: run `pip install torch`, or on a machine without a GPU "
            "`pip install torch --index-url https://download.pytorch.org/whl/cpu`",
            reason="NOT_INSTALLED",
        )


def main() -> int:
    """Returns the exit status."""
    return run_service("worker", _serve, new_loop=new_loop)


if __name__ == "__main__":
    sys.exit(main())
