"""The `loraplex` command: run the stack, generate text, inspect the workers."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex.cli.parsing import Parser

UP_SUMMARY = "Run registry, gateway and workers on this machine."
SIMULATE_SUMMARY = "Run a trace through the scheduler and router under a virtual clock."
NO_SERVERS = (
    "the installed package is loraplex-client, which has no servers: run "
    "`pip uninstall loraplex-client`, then `pip install 'loraplex[local]'`"
)
EPILOG = """example:
  loraplex up --model ./llama-3-8b
  loraplex generate support "Hello" --max-tokens 32

exit codes: 0 ok, 1 other, 2 usage, 4 conflict, 5 auth,
6 unavailable, quota or timeout, 7 not found, 130 interrupted"""


def make_parser() -> Parser:
    """All sub-commands."""
    # Imported late, because `up` and `simulate` replace this process and need none of them.
    from loraplex.cli import bench, completion, fetch, generate, top, usage, vectors
    from loraplex.cli.parsing import make_program

    description = "Serve many LoRA adapters from one base model."
    parser, commands = make_program("loraplex", description, EPILOG, "gateway")
    commands.mention("up", UP_SUMMARY)
    commands.mention("simulate", SIMULATE_SUMMARY)
    generate.add(commands)
    vectors.add(commands)
    fetch.add(commands)
    top.add(commands)
    usage.add(commands)
    bench.add(commands)
    completion.add(commands, "loraplex", make_parser)
    commands.add_connections()
    return parser


def main() -> int:
    """Entry point of the console script. `up` and `simulate` replace this process with theirs."""
    if sys.argv[1:2] in (["up"], ["simulate"]):
        if importlib.util.find_spec("loraplex_services") is None:
            print(f"loraplex {sys.argv[1]}: {NO_SERVERS}", file=sys.stderr)
            return 2
        module = f"loraplex_services.{sys.argv[1]}"
        # -P keeps a module in the working directory from being imported in place of one of ours.
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *sys.argv[2:]])

    try:
        from loraplex.cli.running import main_of

        return main_of(make_parser(), sys.argv[1:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
