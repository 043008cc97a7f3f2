"""Checks over the variables of `env.py`: which service reads what, and names that none reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

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


_NOW_A_SWITCH = "it is a switch now: LORAPLEX_DEBUG={}=VALUE"
GONE = {
    "LORAPLEX_ADAPTER_DTYPE": "it is called LORAPLEX_LORA_DTYPE now",
    "LORAPLEX_CACHE_DIR": "a worker's disk cache is in LORAPLEX_STATE_DIR now",
    "LORAPLEX_FAILPOINTS": _NOW_A_SWITCH.format("failpoint"),
    "LORAPLEX_FIRST_TOKEN_S": "it is no longer read; set first_token_s in requests",
    "LORAPLEX_GC_INTERVAL_S": _NOW_A_SWITCH.format("gc-interval-s"),
    "LORAPLEX_HTTP_KEY": "the private key is in the file of LORAPLEX_HTTP_CERT now, or next to it "
    "with the suffix .key",
    "LORAPLEX_LOAD_FORMAT": _NOW_A_SWITCH.format("load-format"),
    "LORAPLEX_LOG_FORMAT": _NOW_A_SWITCH.format("log-format"),
    "LORAPLEX_LOG_LEVEL": _NOW_A_SWITCH.format("log-level"),
    "LORAPLEX_MAX_BATCH": "it is called LORAPLEX_MAX_NUM_SEQS now",
    "LORAPLEX_MAX_IN_FLIGHT": "it is no longer read; a gateway relays at most 4096 sequences",
    "LORAPLEX_MAX_IN_FLIGHT_PER_TENANT": "it is no longer read; set the limit of a tenant with "
    "`registry tenants set TENANT --max-concurrent N`",
    "LORAPLEX_MAX_NUM_TOKENS": "it is called LORAPLEX_MAX_NUM_BATCHED_TOKENS now",
    "LORAPLEX_MAX_QUEUED": "it is no longer read; at most 4096 requests wait at a gateway, and "
    "`registry tenants set TENANT --max-concurrent N` limits a tenant",
    "LORAPLEX_MAX_RESIDENT": "it is no longer read; a worker has 4096 slots for adapters",
    "LORAPLEX_MAX_STEP_S": "it is no longer read; prompts are cut so that a step in which requests "
    "decode takes about 0.2 s, and LORAPLEX_MAX_NUM_BATCHED_TOKENS bounds its tokens",
    "LORAPLEX_MAX_UNCHECKED_KEY_S": "it is no longer read; while the registry is unreachable, "
    "a key is "
    "accepted for one day at most, and not beyond its own expiry (`registry keys create --ttl`)",
    "LORAPLEX_OVERLAP": _NOW_A_SWITCH.format("overlap"),
    "LORAPLEX_POLICY": "it is no longer read; the order is fair to tenants and adapters",
    "LORAPLEX_PREFIX_CACHE": _NOW_A_SWITCH.format("prefix-cache"),
    "LORAPLEX_REASONING": _NOW_A_SWITCH.format("reasoning-parser"),
    "LORAPLEX_REASONING_PARSER": _NOW_A_SWITCH.format("reasoning-parser"),
    "LORAPLEX_REGISTRY_SERVICE_LISTEN": "the address follows the first one now: "
    "LORAPLEX_REGISTRY_LISTEN=HOST:PORT,mtls:HOST:PORT",
    "LORAPLEX_REPLACE_BASES": _NOW_A_SWITCH.format("replace-bases"),
    "LORAPLEX_STEP_TIMEOUT_S": _NOW_A_SWITCH.format("step-timeout-s"),
    "LORAPLEX_STEP_TRACE": _NOW_A_SWITCH.format("step-trace"),
    "LORAPLEX_TLS_SERVER_NAME": "it is no longer read; certificates of workers at dns:NAME:PORT "
    "must contain NAME",
    "LORAPLEX_TOOL_CALL_PARSER": _NOW_A_SWITCH.format("tool-call-parser"),
    "LORAPLEX_TOOL_FORMAT": _NOW_A_SWITCH.format("tool-call-parser"),
    "LORAPLEX_WORKER_ID": "it is no longer read; a worker is named after its socket or its host",
}
"""Variables that were renamed or removed, and what to do. Ignoring one would hide the change."""


def refuse_unreadable(environ: Mapping[str, str]) -> None:
    """Raises InvalidRequest for a variable or a switch that is no longer read, or never was."""
    for name, way_out in GONE.items():
        if name in environ:
            raise InvalidRequest.field(name, environ[name], way_out)
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


SECTIONS = {
    env.REGISTRY_ADDRESS.name: "Addresses and credentials of clients",
    env.STATE_DIR.name: "Every server",
    env.AUTH.name: "Who may call",
    env.REGISTRY_LISTEN.name: "Registry: where adapters are stored",
    env.GATEWAY_LISTEN.name: "Gateway: which requests are accepted",
    env.WORKER_LISTEN.name: "Worker: the base and how it is computed",
    env.KV_MEMORY.name: "Worker: memory",
    env.MAX_NUM_SEQS.name: "Worker: what a step holds",
}
"""Headings of docs/reference/settings.md by their first variables."""


def settings_markdown() -> str:
    """The tables of docs/reference/settings.md, which a test compares with these."""
    lines = []
    for setting in env.ALL_SETTINGS:
        if title := SECTIONS.get(setting.name):
            lines += ["", f"### {title}", "", *_header("variable")]
        name = f"`{setting.name}`" + (" (or `_FILE`)" if setting.secret else "")
        lines.append(_row(name, setting))
    lines += ["", "### Switches of LORAPLEX_DEBUG", "", *_header("switch")]
    lines += [_row(f"`{switch.name}`", switch) for switch in switches.ALL_SWITCHES]
    return "\n".join(lines[1:])


def _header(first: str) -> list[str]:
    return [f"| {first} | default | read by | meaning |", "|---|---|---|---|"]


def _row(name: str, setting: Setting[object]) -> str:
    default = shown(setting.default)
    return f"| {name} | {default and f'`{default}`'} | {setting.readers} | {setting.doc} |"


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
