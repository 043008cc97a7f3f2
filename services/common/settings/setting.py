"""One LORAPLEX_* variable, or one switch of LORAPLEX_DEBUG: name, parser, default and readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from loraplex.errors import InvalidRequest
from loraplex.units import parse_bytes
from loraplex_services.common.units import (
    choice,
    integer,
    parse_bool,
    parse_list,
    parse_listen,
    parse_path,
    parse_text,
)

T = TypeVar("T")

MAX_SHOWN = 100
"""Characters of a bad value that a message shows."""

DEBUG_LIST = "LORAPLEX_DEBUG"
"""The variable that lists switches for developers."""


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One variable."""

    name: str
    parse: Callable[[str], T]
    """Text to value; raises ValueError saying what is accepted."""
    default: T
    readers: str
    """Which of "up", "registry", "gateway", "worker", "tools" read it; "all" = every server."""
    doc: str
    secret: bool = False
    """Whether it is never shown, and also read from the file named by `<name>_FILE`."""

    def read(self, environ: Mapping[str, str]) -> T:
        """The value, or the default where none is given.

        Raises:
            InvalidRequest: naming the variable or the switch.
        """
        text = self._text(environ)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise self._error(text, str(error)) from None

    def _text(self, environ: Mapping[str, str]) -> str | None:
        """The variable's text; None if it is blank."""
        return environ.get(self.name) or (self._from_file(environ) if self.secret else None)

    def _error(self, text: str, why: str) -> InvalidRequest:
        if self.secret:
            return InvalidRequest.field(self.name, "(secret)", why)
        return InvalidRequest.field(self.name, text, f"{why}, got {text[:MAX_SHOWN]!r}")

    def _from_file(self, environ: Mapping[str, str]) -> str | None:
        path = environ.get(f"{self.name}_FILE", "")
        try:
            return Path(path).read_text().strip() or None if path else None
        except OSError as error:
            raise InvalidRequest.field(
                f"{self.name}_FILE", path, f"cannot be read: {error.strerror}"
            ) from None


class Switch(Setting[T]):
    """One switch of LORAPLEX_DEBUG."""

    def _text(self, environ: Mapping[str, str]) -> str | None:
        return debug_switches(environ).get(self.name)

    def _error(self, text: str, why: str) -> InvalidRequest:
        return InvalidRequest.field(
            DEBUG_LIST, f"{self.name}={text}", f"{self.name}: {why}, got {text!r}"
        )


def debug_switches(environ: Mapping[str, str]) -> dict[str, str]:
    """The switches of LORAPLEX_DEBUG and their values; a name alone means `true`."""
    items = [item.partition("=") for item in parse_list(environ.get(DEBUG_LIST, ""))]
    return {name.strip(): value.strip() if sign else "true" for name, sign, value in items}


def text_setting(name: str, readers: str, doc: str, default: str = "") -> Setting[str]:
    return Setting(name, parse_text, default, readers, doc)


def choice_setting(name: str, values: str, readers: str, doc: str) -> Setting[str]:
    """One of several words; the first is the default."""
    words = values.split()
    return Setting(name, choice(*words), words[0], readers, doc)


def flag_setting(name: str, readers: str, doc: str) -> Setting[bool]:
    """True or false; false by default."""
    return Setting(name, parse_bool, False, readers, doc)


def path_setting(name: str, readers: str, doc: str) -> Setting[Path | None]:
    return Setting(name, parse_path, None, readers, doc)


def bytes_setting(name: str, readers: str, doc: str) -> Setting[int | None]:
    """A size; None unless set."""
    return Setting(name, parse_bytes, None, readers, doc)


def count_setting(name: str, readers: str, doc: str) -> Setting[int | None]:
    """A number of at least one; None unless set."""
    return Setting(name, integer(1), None, readers, doc)


def listen_setting(name: str, readers: str, doc: str, default: str = "") -> Setting[str]:
    return Setting(name, parse_listen, default, readers, doc)


def choice_switch(name: str, values: str, readers: str, doc: str) -> Switch[str]:
    """One of several words; the first is the default."""
    words = values.split()
    return Switch(name, choice(*words), words[0], readers, doc)
