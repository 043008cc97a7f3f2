"""`python -m services.gateway`: HTTP and gRPC in one process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from loraplex.errors import LoraplexError, codes_of
from services.common import env, grpc_server
from services.common.log import setup_logging
from services.gateway.config import GatewayConfig, from_env
from services.gateway.gateway import Gateway

logger = logging.getLogger("services.gateway")


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
    """Returns the exit code."""
    setup_logging("gateway", env.LOG_LEVEL.read(os.environ), env.LOG_FORMAT.read(os.environ))
    for warning in env.unknown_variables(os.environ):
        logger.warning(warning)
    try:
        asyncio.run(serve(from_env(os.environ)))
    except LoraplexError as error:
        print(f"gateway: {error.message}", file=sys.stderr)
        return codes_of(error).exit
    return 0


if __name__ == "__main__":
    sys.exit(main())
