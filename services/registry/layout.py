"""The keys of all objects that the registry stores.

loraplex.json                                   {"layout": 1}
blobs/sha256/<2>/<hex>                          manifests and files, named by their content
adapters/<tenant>/<name>/adapter.json           its visibility
adapters/<tenant>/<name>/versions/<%010d>.json  a version; a tombstone once deleted
adapters/<tenant>/<name>/signatures/<%010d>-<key sha256>.json
adapters/<tenant>/<name>/certificates/<%010d>-<sha256>.json
adapters/<tenant>/<name>/tags/<tag>.json        a tag; without targets once deleted
bases/<quoted id>.json                          a base and its geometry
tenants/<tenant>.json                           quotas
keys/<key id>.json                              an API key, hashed
audit/<yyyy-mm-dd>/<ulid>.json                  one change by one actor
uploads/<upload id>/session.json                what will be sent; none of an upload in one call
uploads/<upload id>/parts/<file>/<offset>-<size>-<sha256>
uploads/<upload id>/intent.json                 written before anything becomes visible
uploads/<upload id>.json                        the same of an upload in one call; removed after it
uploads/<upload id>/finished.json               the acknowledgement
uploads/<upload id>/refused.json                why its content was last refused
usage/<yyyy-mm-dd>.json                         a copy of what was used on a day
index/snapshot-<ulid>-<sha256>.gz               copies of all of adapters/, see snapshots.py
"""

from __future__ import annotations

import json
from urllib.parse import quote

from loraplex.errors import LoraplexError
from loraplex_services.common.objects import ObjectMissing, ObjectStore, PreconditionFailed, store

LAYOUT_KEY = "loraplex.json"
LAYOUT_NUMBER = 1

BLOBS = store.BLOBS
ADAPTERS = "adapters/"
BASES = "bases/"
TENANTS = "tenants/"
KEYS = "keys/"
AUDIT = "audit/"
UPLOADS = "uploads/"
USAGE = "usage/"
SNAPSHOTS = "index/snapshot-"

blob = store.blob_key


def adapter_folder(tenant: str, name: str) -> str:
    """Prefix of everything about one adapter, with the final slash."""
    return f"{ADAPTERS}{tenant}/{name}/"


def adapter(tenant: str, name: str) -> str:
    return f"{adapter_folder(tenant, name)}adapter.json"


def usage(day: str) -> str:
    return f"{USAGE}{day}.json"


def versions_folder(tenant: str, name: str) -> str:
    return f"{adapter_folder(tenant, name)}versions/"


def version(tenant: str, name: str, number: int) -> str:
    return f"{versions_folder(tenant, name)}{number:010d}.json"


def signatures_of(tenant: str, name: str, number: int) -> str:
    """Prefix of the signatures of one version."""
    return f"{adapter_folder(tenant, name)}signatures/{number:010d}-"


def signature(tenant: str, name: str, number: int, key_sha256: str) -> str:
    return f"{signatures_of(tenant, name, number)}{key_sha256}.json"


def certificates_of(tenant: str, name: str, number: int) -> str:
    """Prefix of the certificates of one version."""
    return f"{adapter_folder(tenant, name)}certificates/{number:010d}-"


def certificate(tenant: str, name: str, number: int, sha256: str) -> str:
    return f"{certificates_of(tenant, name, number)}{sha256}.json"


def tags_folder(tenant: str, name: str) -> str:
    return f"{adapter_folder(tenant, name)}tags/"


def tag(tenant: str, name: str, tag_: str) -> str:
    return f"{tags_folder(tenant, name)}{tag_}.json"


def base(base_id: str) -> str:
    return f"{BASES}{quoted(base_id)}.json"


def tenant(tenant_: str) -> str:
    return f"{TENANTS}{tenant_}.json"


def key(key_id: str) -> str:
    return f"{KEYS}{key_id}.json"


def key_id_of(key: str) -> str:
    """The inverse of `key`."""
    return key.removeprefix(KEYS).removesuffix(".json")


def audit(date: str, ulid: str) -> str:
    return f"{AUDIT}{date}/{ulid}.json"


def upload_folder(upload_id: str) -> str:
    return f"{UPLOADS}{upload_id}/"


def upload_session(upload_id: str) -> str:
    return f"{upload_folder(upload_id)}session.json"


def upload_parts(upload_id: str) -> str:
    return f"{upload_folder(upload_id)}parts/"


def upload_part(upload_id: str, file_index: int, offset: int, size: int, sha256: str) -> str:
    return f"{upload_parts(upload_id)}{file_index:03d}/{offset:016d}-{size}-{sha256}"


def upload_intent(upload_id: str) -> str:
    return f"{upload_folder(upload_id)}intent.json"


def lone_intent(upload_id: str) -> str:
    """The intent of an upload in one call, of which there is nothing else."""
    return f"{UPLOADS}{upload_id}.json"


def upload_refused(upload_id: str) -> str:
    return f"{upload_folder(upload_id)}refused.json"


def upload_finished(upload_id: str) -> str:
    return f"{upload_folder(upload_id)}finished.json"


def snapshot(ulid: str, sha256: str) -> str:
    return f"{SNAPSHOTS}{ulid}-{sha256}.gz"


def sha256_of_snapshot(key_: str) -> str:
    """The sha256 that the content of a snapshot must have."""
    return key_.rpartition("-")[2].removesuffix(".gz")


def adapter_of(key_: str) -> tuple[str, str] | None:
    """(tenant, name) of a key under `adapters/`."""
    parts = key_.split("/")
    return (parts[1], parts[2]) if len(parts) >= 4 and parts[0] == "adapters" else None


def quoted(base_id: str) -> str:
    """A base id as one part of a key; capitals are escaped for stores that ignore case."""
    safe = "abcdefghijklmnopqrstuvwxyz0123456789-_"
    return "".join(c if c in safe else _escaped(c) for c in base_id)


def _escaped(character: str) -> str:
    plain = quote(character, safe="")
    return plain if plain.startswith("%") else f"%{ord(character):02X}"


class WrongLayout(LoraplexError):
    """The store was written by a build with another layout."""

    reason = "WRONG_LAYOUT"


async def check_layout_number(store: ObjectStore, key: str, number: int) -> None:
    """Write the layout number to a new store; refuse a store that has another one.

    Raises:
        WrongLayout: naming both numbers.
    """
    try:
        found = json.loads((await store.get(key)).data)
    except ObjectMissing:
        try:
            await store.put_if_absent(key, json.dumps({"layout": number}).encode())
        except PreconditionFailed:
            await check_layout_number(store, key, number)
        return
    except ValueError:
        found = None
    layout = found.get("layout") if isinstance(found, dict) else None
    if layout != number:
        raise WrongLayout(
            f"{store.url} has layout {layout!r} but this version supports {number}; "
            "use the version of Loraplex that wrote it, or another store"
        )
