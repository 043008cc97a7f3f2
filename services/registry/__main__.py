"""`python -m loraplex_services.registry`: one registry process."""

from __future__ import annotations

import sys

from loraplex_services.common.processes.event_loop import new_loop
from loraplex_services.common.processes.process import run_service


async def _serve() -> None:
    # Loaded only now: --help must not wait for gRPC.
    from loraplex_services.registry.api.serving import serve

    await serve()


def main() -> int:
    """Returns the exit status."""
    return run_service("registry", _serve, new_loop=new_loop)


if __name__ == "__main__":
    sys.exit(main())
