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
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # errors are ours to print, as one object
    as_json = bool(getattr(args, "json", False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal's encoding may lack characters of a model's output.
        sys.stdout.reconfigure(errors="backslashreplace")
    for warning in settings.unknown_variables(os.environ):
        print(f"warning: {warning}", file=sys.stderr)
    try:
        _run(args)
        return 0
    except LoraplexError as error:
        return _print(error, as_json)
    except UnicodeError:
        # Python decodes bytes that are not UTF-8 to lone surrogates, which cannot be sent.
        return _print(
            InvalidRequest("an argument or the input is not UTF-8 text; convert it"), as_json
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FileNotFoundError as error:
        return _print(InvalidRequest(f"{error.filename}: does not exist"), as_json)
    except (IsADirectoryError, NotADirectoryError) as error:
        return _print(InvalidRequest(f"{error.filename}: {error.strerror}"), as_json)
    except OSError as error:
        where = f"{error.filename2 or error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}"
        print_error(LoraplexError(message, reason="OS_ERROR"), as_json=as_json)
        return OTHER_FAILURE
    except Exception as error:
        # This is a bug. Scripts get one JSON object as always, people the traceback to report.
        if not as_json:
            raise
        message = f"{type(error).__name__}: {error}; please report this as a bug"
        print_error(LoraplexError(message), as_json=True)
        return OTHER_FAILURE


def _print(error: LoraplexError, as_json: bool) -> int:
    print_error(error, as_json=as_json)
    return codes_of(error).exit


def _run(args: argparse.Namespace) -> None:
    """Run the command's function, and await its result if it returns one."""
    import asyncio

    if (running := args.run(args)) is not None:
        asyncio.run(running)
