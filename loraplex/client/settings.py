"""The addresses and credentials of clients, from arguments or the environment."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loraplex.errors import InvalidRequest

DEFAULT_REGISTRY = "127.0.0.1:50052"
DEFAULT_GATEWAY = "127.0.0.1:50051"
MAX_PORT = 65535
_HOST_AND_PORT = re.compile(r"(?:\[[^\[\]/\s]+\]|[^:/\[\]\s]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Credentials:
    """How a client authenticates itself and the server. All fields are optional."""

    api_key: str = ""
    """Sent as a bearer token with every call."""
    ca: Path | None = None
    """PEM file of the CA that signed the server's certificate; turns TLS on."""
    cert: Path | None = None
    """PEM certificate of this client (mTLS); turns TLS on."""
    key: Path | None = None
    """PEM private key of that certificate."""

    @property
    def uses_tls(self) -> bool:
        """TLS is on as soon as any of its files is given."""
        return any(path is not None for path in (self.ca, self.cert, self.key))

    def __repr__(self) -> str:
        key = "..." if self.api_key else ""
        return f"Credentials(api_key={key!r}, ca={self.ca}, cert={self.cert}, key={self.key})"


VARIABLES = frozenset(
    {
        *("LORAPLEX_REGISTRY_ADDRESS", "LORAPLEX_GATEWAY_ADDRESS"),
        *("LORAPLEX_API_KEY", "LORAPLEX_API_KEY_FILE"),
        *("LORAPLEX_CA", "LORAPLEX_CERT", "LORAPLEX_KEY"),
    }
)
"""The variables that the commands and clients read."""
_LOOKS_MISSPELT = frozenset({"LORAPLEX_ADMIN_KEY_FILE"})
"""Variables of the servers whose names are close to one of those."""


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each LORAPLEX_* variable that looks like a misspelling of a known one."""
    names = sorted(name for name in environ if name.startswith("LORAPLEX_"))
    near = {name: _nearest(name) for name in names if name not in VARIABLES | _LOOKS_MISSPELT}
    return [
        f"unknown variable {name} is ignored; the nearest known one is {variable}"
        for name, variable in near.items()
        if variable
    ]


def _nearest(name: str) -> str:
    found = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.9)
    return found[0] if found else ""


def registry_address(environ: Mapping[str, str]) -> str:
    """LORAPLEX_REGISTRY_ADDRESS or the default."""
    return _address(environ, "LORAPLEX_REGISTRY_ADDRESS", DEFAULT_REGISTRY)


def gateway_address(environ: Mapping[str, str]) -> str:
    """LORAPLEX_GATEWAY_ADDRESS or the default."""
    return _address(environ, "LORAPLEX_GATEWAY_ADDRESS", DEFAULT_GATEWAY)


def check_address(source: str, address: str) -> None:
    """Raises InvalidRequest, which names the flag or variable, unless this is HOST:PORT or one of
    gRPC's addresses with a scheme. gRPC itself takes any port modulo 65,536."""
    if address.startswith(("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")):
        return
    match = _HOST_AND_PORT.fullmatch(address)
    if match and 1 <= int(match[1]) <= MAX_PORT:
        return
    fixed = address.rpartition("://")[2].rstrip("/")
    if ":" not in fixed:
        fixed += ":PORT"
    hint = f"; try '{fixed}'" if fixed != address else ""
    raise InvalidRequest.field(
        source, address, f"expected HOST:PORT with a port from 1 to {MAX_PORT}{hint}"
    )


def _address(environ: Mapping[str, str], name: str, default: str) -> str:
    address = environ.get(name) or default
    check_address(name, address)
    return address


def credentials(environ: Mapping[str, str]) -> Credentials:
    """Credentials from LORAPLEX_API_KEY[_FILE], LORAPLEX_CA, LORAPLEX_CERT and LORAPLEX_KEY.

    Raises InvalidRequest naming the variable, and never showing the key.
    """
    api_key = environ.get("LORAPLEX_API_KEY", "")
    key_file = environ.get("LORAPLEX_API_KEY_FILE", "")
    source = "LORAPLEX_API_KEY"
    if not api_key and key_file:
        source = "LORAPLEX_API_KEY_FILE"
        api_key = _read(source, key_file)
    if not (api_key.isascii() and api_key.isprintable()):
        why = "must hold one line of visible ASCII characters, as `registry keys create` prints it"
        raise InvalidRequest.field(source, "...", why)
    return Credentials(
        api_key,
        _existing(environ, "LORAPLEX_CA"),
        _existing(environ, "LORAPLEX_CERT"),
        _existing(environ, "LORAPLEX_KEY"),
    )


def _existing(environ: Mapping[str, str], name: str) -> Path | None:
    path = environ.get(name, "")
    if path and not Path(path).is_file():
        raise InvalidRequest.field(name, path, f"no file {path}")
    return Path(path) if path else None


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise InvalidRequest.field(name, path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest.field(name, path, "holds bytes that are not UTF-8") from None
