"""Arguments that all commands share, and usage errors in both output formats."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import loraplex
from loraplex.client.settings import DEFAULT_GATEWAY, DEFAULT_REGISTRY
from loraplex.printable import printable
from loraplex.units import parse_bytes, parse_seconds

T = TypeVar("T")
Run = Callable[[argparse.Namespace], Awaitable[None] | None]
DEFAULT_WHEN_LOADED = "5m"
REF_FORMS = "NAME, NAME:TAG, NAME:vN or NAME@sha256:..."


class Parser(argparse.ArgumentParser):
    """Prints usage errors, as JSON if `--json` is among the arguments, and exits with 2. Help is
    shown in the lines in which it was written."""

    def __init__(self, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here: argparse leaves those of a command to the program, whose
        usage does not show what the command accepts."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        message = with_nearest(message)
        if "--json" in sys.argv:
            from loraplex.cli.output import print_error
            from loraplex.errors import InvalidRequest

            print_error(InvalidRequest(f"usage: {message}", reason="USAGE"), as_json=True)
            self.exit(2)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {printable(message)}\n")


def with_nearest(message: str) -> str:
    """The message of argparse about an invalid choice, with the nearest valid one."""
    match = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if match is None:
        return message
    return message + did_you_mean(match[1], re.findall(r"[\w-]+", match[2]))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that names the known word that is most like this one; "" if none is."""
    import difflib

    names = {each.lstrip("-"): each for each in known}
    near = difflib.get_close_matches(word.lstrip("-"), names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def make_program(name: str, description: str, epilog: str, server: str) -> tuple[Parser, Commands]:
    """The parser of a program, most of whose commands call `server`, and where to add them."""
    parser = Parser(prog=name, description=description, epilog=epilog)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    return parser, Commands(parser, server, [])


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"{parser.prog} {loraplex.__version__}")
        parser.exit(0)


class Commands:
    """The commands of a program, or of a group of commands."""

    def __init__(self, parser: Parser, server: str, calling: list[tuple[Parser, str]]) -> None:
        self._parsers = parser.add_subparsers(metavar="COMMAND", required=True)
        self._server = server
        self._calling = calling
        """Commands of the program that call a server, "registry" or "gateway"."""

    def add(
        self, name: str, run: Run | None, summary: str, example: str, server: str | None = None
    ) -> Parser:
        """Add a command with an example in its help.

        Args:
            run: None for a group of commands.
            server: the one that it calls; "" = none, None = the one that most commands call.
        """
        epilog = f"example:\n  {example}"
        parser = self._parsers.add_parser(name, help=summary, description=summary, epilog=epilog)
        if run is not None:
            parser.set_defaults(run=run)
        if called := self._server if server is None else server:
            self._calling.append((parser, called))
        return parser

    def group(self, name: str, summary: str, example: str) -> Commands:
        """Add a command that has commands of its own; returns where to add them."""
        parser = self.add(name, None, summary, example, server="")
        return Commands(parser, self._server, self._calling)

    def mention(self, name: str, summary: str) -> None:
        """List a command whose arguments another process parses."""
        self._parsers.add_parser(name, help=summary, add_help=False)

    def add_connections(self) -> None:
        """Add the flags of the connection to the commands, behind their own."""
        for parser, server in self._calling:
            _add_connection(parser, server)


def _add_connection(parser: argparse.ArgumentParser, server: str) -> None:
    """`--registry` or `--gateway`, TLS files and `--json`."""
    default = {"registry": DEFAULT_REGISTRY, "gateway": DEFAULT_GATEWAY}[server]
    group = parser.add_argument_group("connection")
    group.add_argument(
        f"--{server}",
        metavar="HOST:PORT",
        help=f"address of the {server} (default: LORAPLEX_{server.upper()}_ADDRESS, or {default})",
    )
    group.add_argument(
        "--ca",
        metavar="FILE",
        help="PEM file of the CA that signed the server's certificate; turns TLS on",
    )
    group.add_argument("--cert", metavar="FILE", help="PEM file of the client's certificate")
    group.add_argument("--key", metavar="FILE", help="PEM file of the certificate's private key")
    add_json(parser)


def add_unused_server(parser: argparse.ArgumentParser, server: str) -> None:
    """Accept `--registry` or `--gateway` in an offline command, because scripts pass one to all
    commands. The help of the command does not show it."""
    parser.add_argument(f"--{server}", help=argparse.SUPPRESS)


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def key_value(text: str) -> tuple[str, str]:
    """`K=V`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected K=V, got {text!r}")
    return key, value


def seconds(text: str) -> float:
    """`90`, `5m`, `12h` or `30d`."""
    return _parsed(parse_seconds, text)


def num_bytes(text: str) -> int:
    """`500MB` or `50GiB`."""
    return _parsed(parse_bytes, text)


def count(text: str) -> int:
    """An integer that fits an unsigned field of 32 bits."""
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(
            f"expected an integer of at least 0 and below 2^32, got {text!r}"
        )
    return int(text)


def number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    """A number that fits; `expected` says what does."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def _parsed(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None


def add_label(parser: argparse.ArgumentParser, *flags: str, about: str) -> None:
    """`--label K=V`, which may be repeated."""
    parser.add_argument(
        *("--label", *flags),
        action="append",
        default=[],
        type=key_value,
        metavar="K=V",
        help=f"{about}; may be repeated",
    )


def add_when_loaded(parser: argparse.ArgumentParser) -> None:
    """`--when-loaded[=TIME]` and `--wait`; `spelled_out` gives the bare form its value."""
    parser.add_argument(
        "--when-loaded",
        metavar="TIME",
        type=seconds,
        default=0.0,
        help="move the tags only after workers have loaded the version, within 5m; another limit "
        "needs the form --when-loaded=TIME, with '=', such as --when-loaded=90s",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="with --when-loaded: wait until the tags have moved; the exit code is 6 if they "
        "cannot be moved",
    )


_BEFORE_COMMANDS = ("--registry", "--gateway", "--ca", "--cert", "--key")


def spelled_out(argv: Sequence[str]) -> list[str]:
    """The arguments as argparse expects them.

    Connection flags before the command are moved behind it, and a bare `--when-loaded` gets its
    default value, so that it does not consume the next argument.
    """
    bare = "--when-loaded"
    words = [f"{bare}={DEFAULT_WHEN_LOADED}" if word == bare else word for word in argv]
    moved: list[str] = []
    while words and words[0].partition("=")[0] in (*_BEFORE_COMMANDS, "--json"):
        num_words = 2 if words[0] in _BEFORE_COMMANDS else 1
        moved += words[:num_words]
        words = words[num_words:]
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *moved, *words[end:]]
