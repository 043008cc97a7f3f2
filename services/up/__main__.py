"""Entry point of `loraplex up`."""

from __future__ import annotations

import logging
import os
import signal
import sys

from loraplex.errors import LoraplexError, codes_of
from loraplex.printable import printable
from loraplex_services.common.settings import env, variables
from loraplex_services.common.telemetry.log import setup_logging
from loraplex_services.up import flags
from loraplex_services.up.packages import check_packages
from loraplex_services.up.ports import choose_ports
from loraplex_services.up.state import StateDir
from loraplex_services.up.wiring import addresses_of, child_specs

logger = logging.getLogger(__name__)


def main() -> int:
    """Run the stack until a signal; returns the exit code."""
    try:
        config = flags.parse(sys.argv[1:], os.environ)
        check_packages()
        return _run(config)
    except LoraplexError as error:
        print(f"loraplex up: {printable(error.message)}", file=sys.stderr)
        return codes_of(error).exit
    except KeyboardInterrupt:  # The supervisor handles signals, and is not running yet.
        return 128 + signal.SIGINT


def _run(config: flags.UpConfig) -> int:
    setup_logging("up", config.log_level, config.log_format)
    for warning in variables.unknown_variables(os.environ):
        logger.warning(warning)
    state = StateDir(config.state_dir)
    try:
        return _supervise(config, state)
    finally:
        state.release()


def _supervise(config: flags.UpConfig, state: StateDir) -> int:
    addresses = addresses_of(choose_ports(config.listeners))
    specs = child_specs(config, addresses, state, os.environ)
    scheme = "http" if env.HTTP_CERT.read(os.environ) is None else "https"
    line = (
        f"loraplex ready {scheme}://{addresses.http} grpc {addresses.grpc} "
        f"registry {addresses.registry}"
    )

    # Loaded only now: --help must not wait for gRPC.
    import asyncio

    from loraplex_services.up.supervisor import ChildFailed, Supervisor

    async def supervise() -> int:
        return await Supervisor(specs, config.drain_s, line).run()

    try:
        return asyncio.run(supervise())
    except ChildFailed as error:
        message = flags.named_as_given(error.message, sys.argv[1:], os.environ)
        print(f"loraplex up: {printable(message)}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
