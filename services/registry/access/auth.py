"""Authenticates the callers of the registry."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import unquote

from loraplex.errors import InvalidRequest, Unauthenticated
from loraplex_services.common.callers import Auth, Caller, peer_names
from loraplex_services.common.security.addresses import is_local
from loraplex_services.common.security.service_token import is_service_token, read_service_token
from loraplex_services.common.security.tls import is_service
from loraplex_services.common.security.wrong_keys import WrongKeys
from loraplex_services.common.settings import env
from loraplex_services.registry.access.keys import Keys
from loraplex_services.registry.access.permissions import SERVICE
from loraplex_services.registry.config import RegistryConfig

_BEARER = "bearer "
FIRST_KEY_METHOD = "/loraplex.v1.RegistryService/CreateFirstKey"
NOBODY = Caller("default", "nobody", frozenset())
SERVICE_CALLER = Caller("default", "service", frozenset({"reader", SERVICE}))


class KeyAuth:
    """Authenticates calls by API key, by the service token, or by a service's certificate.

    Keys and the token come as `authorization: Bearer <token>`.
    """

    def __init__(self, keys: Keys, service_token: str, service_names: Collection[str] = ()) -> None:
        self._keys = keys
        self._wrong_keys = WrongKeys()
        self._service_token = service_token
        self._service_names = service_names

    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """The caller of one method. Raises Unauthenticated; ResourceExhausted for a peer that sent
        many wrong keys."""
        if is_service(peer_names.get(), self._service_names):
            return SERVICE_CALLER
        if method == FIRST_KEY_METHOD:  # its handler looks at where the call comes from
            return NOBODY
        value = metadata.get("authorization", "")
        if not value.lower().startswith(_BEARER):
            raise Unauthenticated(
                "this registry requires an API key: set LORAPLEX_API_KEY or LORAPLEX_API_KEY_FILE"
            )
        token = value[len(_BEARER) :].strip()
        if is_service_token(token, self._service_token):
            return SERVICE_CALLER
        if not self._keys.remembers(token):
            self._wrong_keys.check()
        try:
            return await self._keys.check(token)
        except Unauthenticated:
            self._wrong_keys.count()
            raise


def caller_auth(config: RegistryConfig, keys: Keys) -> Auth | None:
    """The check for this configuration; None without auth, which is for loopback.

    Raises:
        InvalidRequest: an address beyond loopback without auth, or an unreadable token file.
    """
    if config.auth == "keys":
        token = _service_token(config.service_token_file)
        return KeyAuth(keys, token, config.service_names)
    if config.auth == "off" and not is_local(config.listen):
        raise InvalidRequest.field(
            env.REGISTRY_LISTEN.name,
            config.listen,
            "other machines could reach it without auth: set LORAPLEX_AUTH=keys, or "
            "LORAPLEX_AUTH=insecure to allow that",
        )
    return None


def is_local_peer(peer: str) -> bool:
    """Whether gRPC's name of a peer, such as `ipv4:127.0.0.1:4711`, is on this machine."""
    kind, _, address = unquote(peer).partition(":")
    if kind == "unix":
        return True
    try:
        host = ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return (mapped or host).is_loopback


def _service_token(path: Path | None) -> str:
    token = read_service_token(path)
    if any(len(line) < 16 for line in token.split()):
        raise InvalidRequest.field(
            env.SERVICE_TOKEN_FILE.name, str(path), "each line must have at least 16 characters"
        )
    return token
