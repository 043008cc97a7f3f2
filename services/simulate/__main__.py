"""`python -m services.simulate`, which is `loraplex simulate`."""

from __future__ import annotations

import sys

from loraplex.cli.running import main_of


def main() -> int:
    """Process entry; exit codes as those of `loraplex`."""
    try:
        from services.simulate.command import make_parser, run
    except ModuleNotFoundError as missing:
        print(
            f"error: simulating needs the worker's scheduler, and {missing.name} is not installed: "
            "pip install 'loraplex[worker-core]'",
            file=sys.stderr,
        )
        return 1
    parser = make_parser()
    parser.set_defaults(run=run)
    return main_of(parser, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
