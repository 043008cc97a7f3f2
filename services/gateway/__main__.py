"""`python -m services.gateway`: HTTP and gRPC in one process."""

from __future__ import annotations

import os
import sys

from services.common import grpc_server
from services.common.process import run_service
from services.gateway.config import GatewayConfig, from_env
from services.gateway.gateway import Gateway


async def serve(config: GatewayConfig) -> None:
    """Run until SIGTERM, then let running requests end."""
    gateway = Gateway(config)
    await gateway.start()
    try:
        await grpc_server.serve(
            gateway.grpc,
            drain=lambda: gateway.drain(config.drain_s),
            drain_s=config.drain_s,
        )
    finally:
        await gateway.close()


def main() -> int:
    """Returns the exit status."""
    return run_service("gateway", lambda: serve(from_env(os.environ)))


if __name__ == "__main__":
    sys.exit(main())
