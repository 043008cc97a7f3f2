"""The `registry` command: publish, find and manage adapters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex.cli.parsing import Parser

EPILOG = """example:
  registry upload ./adapter --name support && registry list

exit codes: 0 ok, 1 other, 2 usage, 3 adapter refused, 4 conflict, 5 auth,
6 unavailable, quota or timeout, 7 not found, 130 interrupted"""


def make_parser() -> Parser:
    """All sub-commands."""
    # Imported within `main`, where an interrupt prints nothing.
    from loraplex.cli import (
        access,
        admin,
        catalog,
        certify,
        completion,
        provenance,
        publish,
        rewriting,
        sharing,
        tags,
    )
    from loraplex.cli.parsing import make_program

    description = "Publish, find and manage LoRA adapters."
    parser, commands = make_program("registry", description, EPILOG, "registry")
    for group in (publish, rewriting, catalog, tags, sharing, provenance, certify, admin, access):
        group.add(commands)
    completion.add(commands, "registry", make_parser)
    commands.add_connections()
    return parser


def main() -> int:
    """Entry point of the console script."""
    try:
        from loraplex.cli.running import main_of

        return main_of(make_parser(), sys.argv[1:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
