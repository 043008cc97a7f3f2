"""`registry keys` and `registry tenants`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.cli.clients import registry_client
from loraplex.cli.output import moment, show, show_table, sized
from loraplex.cli.parsing import Commands, count, num_bytes, seconds
from loraplex.errors import InvalidRequest

if TYPE_CHECKING:
    from loraplex.api.registry import ApiKey
    from loraplex.api.tenants import Tenant


def add(commands: Commands) -> None:
    _add_keys(commands)
    _add_tenants(commands)


def _add_keys(commands: Commands) -> None:
    group = commands.group("keys", "Manage API keys.", "registry keys list")
    parser = group.add(
        "create",
        _keys_create,
        "Create an API key. Its secret is printed once.",
        "registry keys create --tenant acme --scope publisher --ttl 90d",
    )
    parser.add_argument(
        "--tenant", default="", help="tenant that the key belongs to (default: your own)"
    )
    parser.add_argument(
        "--scope",
        action="append",
        default=[],
        choices=("reader", "publisher", "admin"),
        help="what the key may do; may be repeated (default: reader)",
    )
    parser.add_argument(
        "--ttl",
        type=seconds,
        metavar="TIME",
        help="how long the key is valid (default: forever)",
    )
    parser.add_argument(
        "--description", default="", metavar="TEXT", help="note that `registry keys list` shows"
    )
    parser.add_argument(
        "--bootstrap",
        action="store_true",
        help="create the first admin key; a registry on this machine does so once. If no registry "
        "answers, generate a key for LORAPLEX_ADMIN_KEY_FILE",
    )
    parser = group.add("list", _keys_list, "List keys.", "registry keys list")
    parser.add_argument(
        "--tenant",
        default="",
        help="list the keys of this tenant (default: your own, or all with the first admin key)",
    )
    parser = group.add("revoke", _keys_revoke, "Revoke a key.", "registry keys revoke k7f3")
    parser.add_argument("key_id", metavar="KEY_ID")


def _add_tenants(commands: Commands) -> None:
    group = commands.group("tenants", "Manage tenants and their limits.", "registry tenants list")
    parser = group.add(
        "set",
        _tenants_set,
        "Create a tenant, or change the limits that you name. A limit of 0 means no limit.",
        "registry tenants set acme --max-bytes 50GiB --require-signature-by release.pem",
    )
    parser.add_argument("tenant", metavar="TENANT")
    parser.add_argument(
        "--max-bytes", type=num_bytes, metavar="BYTES", help="largest total size of stored files"
    )
    parser.add_argument(
        "--max-versions", type=count, metavar="N", help="largest number of stored versions"
    )
    parser.add_argument("--requests-per-s", type=float, metavar="N", help="requests per second")
    parser.add_argument("--tokens-per-s", type=float, metavar="N", help="tokens per second")
    parser.add_argument(
        "--max-concurrent", type=count, metavar="N", help="requests in progress at the same time"
    )
    parser.add_argument(
        "--fairness-weight",
        type=float,
        metavar="N",
        help="share of the capacity under overload, relative to other tenants (default: 1)",
    )
    parser.add_argument(
        "--max-kl",
        type=float,
        metavar="NATS",
        help="tags may point only at versions whose certified divergence is at most this",
    )
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument(
        "--require-signature-by",
        dest="signature_keys",
        action="append",
        type=Path,
        metavar="PEM",
        help="accept only versions that are signed by this EC public key; may be repeated",
    )
    policy.add_argument(
        "--require-no-signature",
        dest="signature_keys",
        action="store_const",
        const=[],
        help="accept unsigned versions again",
    )
    parser = group.add("list", _tenants_list, "List tenants.", "registry tenants list")


async def _first_admin_key(args: argparse.Namespace) -> None:
    """Print the first admin key of the registry, or generate one if no registry answers."""
    from loraplex.api_keys import draw_key, token_of
    from loraplex.errors import Unavailable

    try:
        async with registry_client(args) as client:
            key, token = await client.admin.create_first_key()
    except Unavailable as error:
        hint = (
            "generated a key instead: save it to a file, set LORAPLEX_ADMIN_KEY_FILE to that "
            "file's path, and start the registry"
        )
        print(f"{error.message}\n{hint}", file=sys.stderr)
        key_id, secret = draw_key()
        token = token_of(key_id, secret)
        show({"key_id": key_id, "token": token}, token, as_json=args.json)
        return
    print(
        "note: a registry answered and created this key for itself; to generate one for another "
        "registry, name an address where none answers with --registry",
        file=sys.stderr,
    )
    _print_key(key, token, args.json)


def _print_key(key: ApiKey, token: str, as_json: bool) -> None:
    show({**dataclasses.asdict(key), "token": token}, token, as_json=as_json)


async def _keys_create(args: argparse.Namespace) -> None:
    if args.bootstrap:
        await _first_admin_key(args)
        return
    if args.ttl == 0.0:  # which the registry would take for a key that never expires
        why = "must be more than 0; leave it out for a key that does not expire"
        raise InvalidRequest.field("--ttl", "0", why)
    async with registry_client(args) as client:
        key, token = await client.admin.create_key(
            args.tenant, args.scope or ["reader"], args.ttl or 0.0, args.description
        )
        if args.tenant and len(await client.admin.keys(args.tenant)) == 1:
            print(f"note: this is the first key of tenant {key.tenant}", file=sys.stderr)
    _print_key(key, token, args.json)


async def _keys_list(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        keys = await client.admin.keys(args.tenant)
    header = ("KEY", "TENANT", "SCOPES", "EXPIRES", "DESCRIPTION")
    show_table(header, keys, _key_row, as_json=args.json)


def _key_row(key: ApiKey) -> tuple[str, ...]:
    expires = "revoked" if key.revoked else moment(key.expires_unix_s) or "never"
    return key.key_id, key.tenant, ",".join(key.scopes), expires, key.description


async def _keys_revoke(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        key = await client.admin.revoke_key(args.key_id)
    show(key, f"revoked {key.key_id}", as_json=args.json)


async def _tenants_set(args: argparse.Namespace) -> None:
    from loraplex.api.tenants import Tenant

    fields = [field.name for field in dataclasses.fields(Tenant) if field.name != "tenant"]
    given = {name: value for name in fields if (value := getattr(args, name, None)) is not None}
    if not given:  # The registry would take it as a change of all settings to their defaults.
        why = "name a setting to change, such as --max-bytes 50GiB"
        raise InvalidRequest.field("TENANT", args.tenant, why)
    if "signature_keys" in given:
        given["signature_keys"] = _public_keys(given["signature_keys"])
    async with registry_client(args) as client:
        tenant = await client.admin.set_tenant(Tenant(args.tenant, **given), given)
    show(tenant, f"set {tenant.tenant}", as_json=args.json)


def _public_keys(paths: list[Path]) -> tuple[str, ...]:
    from loraplex.signing import public_key, public_pem

    return tuple(public_pem(public_key(path)) for path in paths)


async def _tenants_list(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        tenants = await client.admin.tenants()
    header = ("TENANT", "USED", "LIMIT", "VERSIONS", "LIMIT", "SIGNATURE", "MAX KL")
    show_table(header, tenants, _tenant_row, as_json=args.json)


def _tenant_row(tenant: Tenant) -> tuple[str, ...]:
    return (
        tenant.tenant,
        sized(tenant.used_bytes),
        sized(tenant.max_bytes) if tenant.max_bytes else "-",
        str(tenant.used_versions),
        str(tenant.max_versions or "-"),
        "required" if tenant.signature_keys else "-",
        f"{tenant.max_kl:g}" if tenant.max_kl else "-",
    )
