"""`python -m loraplex_services.simulate`, which is `loraplex simulate`."""

from __future__ import annotations

import argparse
import sys

from loraplex.cli.running import main_of
from loraplex.errors import Unsupported
from loraplex_services.simulate.flags import make_parser


def _run(args: argparse.Namespace) -> None:
    """Loads the worker's scheduler only now: `--help` does without."""
    try:
        from loraplex_services.simulate.command import run
    except ModuleNotFoundError as missing:
        raise Unsupported(
            f"simulating needs the worker's scheduler, and {missing.name} is not installed: "
            "pip install 'loraplex[worker-core]'",
            reason="NOT_INSTALLED",
        ) from None
    run(args)


def main() -> int:
    """Process entry; exit codes as those of `loraplex`."""
    parser = make_parser()
    parser.set_defaults(run=_run)
    return main_of(parser, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
