"""The variables of `env.py` taken together: what each service reads, and what nobody does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from loraplex.errors import InvalidRequest
from loraplex_services.common import env
from loraplex_services.common.knob import Knob

_SERVICE_LINK = re.compile(
    r"_(HOST|SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)$"
)


def known_names() -> set[str]:
    """Every variable that some service reads."""
    files = {f"{knob.name}_FILE" for knob in env.ALL_KNOBS if knob.secret}
    return files | {knob.name for knob in env.ALL_KNOBS}


RENAMED = {
    "LORAPLEX_ADAPTER_DTYPE": "LORAPLEX_LORA_DTYPE",
    "LORAPLEX_MAX_BATCH": "LORAPLEX_MAX_NUM_SEQS",
    "LORAPLEX_MAX_NUM_TOKENS": "LORAPLEX_MAX_NUM_BATCHED_TOKENS",
}
"""Old name -> present name. A silent change would be worse than an error."""


def refuse_renamed(environ: Mapping[str, str]) -> None:
    """Raises InvalidRequest where a variable has a name that is no longer read."""
    for old, new in RENAMED.items():
        if old in environ:
            raise InvalidRequest.field(old, environ[old], f"the variable is called {new} now")


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One warning for each LORAPLEX_* variable that nobody reads.

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


def markdown_table() -> str:
    """The table of docs/reference/settings.md, which a test compares with this one."""
    rows = ["| variable | default | read by | meaning |", "|---|---|---|---|"]
    for knob in env.ALL_KNOBS:
        name = f"`{knob.name}`" + (" (or `_FILE`)" if knob.secret else "")
        default = shown(knob.default)
        rows.append(f"| {name} | {default and f'`{default}`'} | {knob.readers} | {knob.doc} |")
    return "\n".join(rows)


def read_by(service: str) -> list[Knob[object]]:
    """The variables that a service reads, in the order of the table."""
    return [knob for knob in env.ALL_KNOBS if {service, "all"} & set(knob.readers.split())]


def shown(default: object) -> str:
    """A default as text; "" where there is none."""
    if default is None or default == "" or default == ():
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default).lower()
