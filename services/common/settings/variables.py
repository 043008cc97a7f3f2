"""Checks over the variables of `env.py`: which service reads what, and names that none reads."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from loraplex.errors import InvalidRequest
from loraplex_services.common.settings import env, switches
from loraplex_services.common.settings.setting import Setting, debug_switches

_SERVICE_LINK = re.compile(
    r"_(HOST|SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)$"
)


def known_names() -> set[str]:
    """Every variable that some service reads."""
    files = {f"{setting.name}_FILE" for setting in env.ALL_SETTINGS if setting.secret}
    return files | {setting.name for setting in env.ALL_SETTINGS}


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/loraplex`."""
    home = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "loraplex"


def check_switches(environ: Mapping[str, str]) -> None:
    """Raises InvalidRequest for a switch that no service reads."""
    known = [switch.name for switch in switches.ALL_SWITCHES]
    for name in debug_switches(environ):
        if name not in known:
            raise InvalidRequest.field(
                env.DEBUG.name,
                name,
                f"{name!r} is not a switch; the switches are {', '.join(known)}",
            )


def check_values(environ: Mapping[str, str], services: Collection[str]) -> None:
    """Read what services read and `loraplex up` does not. Raises InvalidRequest for a bad value."""
    for setting in (*env.ALL_SETTINGS, *switches.ALL_SWITCHES):
        readers = set(setting.readers.split())
        if "up" not in readers and {*services, "all"} & readers:
            setting.read(environ)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One warning for each LORAPLEX_* variable that no service reads.

    Names shaped like the service links that Kubernetes injects are left out.
    """
    known = known_names()
    warnings = []
    for name in sorted(environ):
        if not name.startswith("LORAPLEX_") or name in known or _SERVICE_LINK.search(name):
            continue
        nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
        warnings.append(f"unknown variable {name} is ignored; the nearest known one is {nearest}")
    return warnings


def read_by(service: str) -> list[Setting[object]]:
    """The variables that a service reads, in the order of the table."""
    return [
        setting for setting in env.ALL_SETTINGS if {service, "all"} & set(setting.readers.split())
    ]


def shown(default: object) -> str:
    """A default as text; "" where there is none."""
    if default is None or default == "" or default == ():
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default).lower()
