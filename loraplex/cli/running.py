"""Runs a command and returns its exit code; handles errors, interrupts and closed pipes."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from loraplex.cli.output import print_error
from loraplex.cli.parsing import Parser, spelled_out
from loraplex.client import settings
from loraplex.errors import InvalidRequest, LoraplexError, codes_of

INTERRUPTED = 130
OTHER_FAILURE = 1


def main_of(parser: Parser, argv: Sequence[str]) -> int:
    """Parse and run one command; returns its exit code. Without a command, prints the help."""
    if not argv:
        parser.print_help()
        return 0
    args = parser.parse_args(spelled_out(argv))
    as_json = bool(getattr(args, "json", False))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack what a model says
        sys.stdout.reconfigure(errors="backslashreplace")
    for warning in settings.unknown_variables(os.environ):
        print(f"warning: {warning}", file=sys.stderr)
    try:
        _run(args)
        return 0
    except LoraplexError as error:
        return _print(error, as_json)
    except UnicodeError:
        # Python reads bytes that are not UTF-8 as halves of surrogate pairs, which none can send.
        return _print(InvalidRequest("an argument or the input is not UTF-8 text"), as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FileNotFoundError as error:
        return _print(InvalidRequest(f"{error.filename}: does not exist"), as_json)
    except OSError as error:
        print_error(LoraplexError(str(error), reason="OS_ERROR"), as_json=as_json)
        return OTHER_FAILURE
    except Exception as error:
        # A bug of ours. Scripts still get their one object; people get what to report.
        if not as_json:
            raise
        message = f"{type(error).__name__}: {error}; please report this as a bug"
        print_error(LoraplexError(message), as_json=True)
        return OTHER_FAILURE


def _print(error: LoraplexError, as_json: bool) -> int:
    print_error(error, as_json=as_json)
    return codes_of(error).exit


def _run(args: argparse.Namespace) -> None:
    """What a command's function returns is awaited, if it is anything."""
    import asyncio

    if (running := args.run(args)) is not None:
        asyncio.run(running)
