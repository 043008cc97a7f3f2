"""`python -m loraplex_services.gateway`: HTTP and gRPC in one process."""

from __future__ import annotations

import gc
import os
import sys

from loraplex_services.common import grpc_server
from loraplex_services.common.process import run_service
from loraplex_services.common.signals import stop_event
from loraplex_services.gateway.config import GatewayConfig, from_env
from loraplex_services.gateway.event_loop import new_loop
from loraplex_services.gateway.gateway import Gateway


async def serve(config: GatewayConfig) -> None:
    """Run until SIGTERM, then let running requests end.

    Raises: InvalidRequest, AlreadyExists: it cannot be started, or its base cannot be registered.
    """
    stopping = stop_event()
    gateway = Gateway(config, give_up=stopping)
    await gateway.start()
    _calm_collector()
    try:
        await grpc_server.serve(
            gateway.grpc,
            drain=lambda: gateway.drain(config.drain_s),
            drain_s=config.drain_s,
            stopping=stopping,
        )
    finally:
        await gateway.close()
    if gateway.error is not None:
        raise gateway.error


def _calm_collector() -> None:
    """Exclude the objects that exist now from garbage collection.

    Walking all modules and tables would stop all streams for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


def main() -> int:
    """Returns the exit status."""
    return run_service("gateway", lambda: serve(from_env(os.environ)), new_loop=new_loop)


if __name__ == "__main__":
    sys.exit(main())
