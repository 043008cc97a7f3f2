"""Builds and parses signatures of a version's files in the `model_signing` format; the cryptography
is in `signing`.

A signature is a sigstore bundle v0.3: a DSSE envelope around an in-toto statement that lists every
file with its sha256. Other tools can verify it against a downloaded folder.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.errors import InvalidRequest

SIGNATURE_FILE = "model.sig"
"""Where `model_signing` looks for the signature of a folder."""
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
MAX_BUNDLE_BYTES = 256 << 10

_IGNORED = (".git", ".gitattributes", ".github", ".gitignore", SIGNATURE_FILE)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A parsed bundle. Nothing in it is verified yet."""

    key_sha256: str
    """sha256 of the public key in PEM, as the signer states it."""
    payload: bytes
    signature: bytes
    files: Mapping[str, str]
    """sha256 by path, as the statement lists them."""


def statement(subject: str, files: Mapping[str, str]) -> bytes:
    """The in-toto statement that is signed.

    Args:
        subject: name of the adapter, for people.
        files: sha256 by path.
    """
    ordered = sorted(files.items())
    root = hashlib.sha256(b"".join(bytes.fromhex(sha256) for _, sha256 in ordered)).hexdigest()
    resources = [{"name": p, "algorithm": "sha256", "digest": sha256} for p, sha256 in ordered]
    serialization = {
        "method": "files",
        "hash_type": "sha256",
        "allow_symlinks": False,
        "ignore_paths": list(_IGNORED),
    }
    value = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": subject, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"serialization": serialization, "resources": resources},
    }
    return json.dumps(value, separators=(",", ":")).encode()


def signed_bytes(payload: bytes) -> bytes:
    """The bytes that are signed: DSSE's pre-authentication encoding."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def make_bundle(payload: bytes, signature: bytes, key_sha256: str) -> bytes:
    """The bundle as JSON."""
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
    }
    value = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": key_sha256}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }
    return json.dumps(value, separators=(",", ":")).encode()


def parse_bundle(raw: bytes) -> Bundle:
    """Parse a bundle. Raises InvalidRequest if it has another format."""
    if len(raw) > MAX_BUNDLE_BYTES:
        description = f"is larger than {MAX_BUNDLE_BYTES} bytes"
        raise InvalidRequest.field("bundle", f"{len(raw)} bytes", description)
    try:
        return _parsed(json.loads(raw))
    except (KeyError, IndexError, TypeError, ValueError, RecursionError, binascii.Error) as error:
        description = (
            f"is not a sigstore bundle v0.3 with a model_signing statement ({error!r}); sign with "
            "'registry sign' or 'model_signing sign key'"
        )
        raise InvalidRequest.field("bundle", f"{len(raw)} bytes", description) from None


def check_files(bundle: Bundle, files: Mapping[str, str]) -> None:
    """Raises InvalidRequest unless the statement lists exactly these files (sha256 by path)."""
    for path in sorted({*bundle.files, *files}):
        if bundle.files.get(path) != files.get(path):
            described = bundle.files.get(path, "not listed")
            actual = files.get(path, "not there")
            description = f"the signature says {described}, the version has {actual}"
            raise InvalidRequest.field(f"bundle:{path}", described, description)


def _parsed(value: Any) -> Bundle:
    envelope = value["dsseEnvelope"]
    if value["mediaType"] != BUNDLE_TYPE or envelope["payloadType"] != PAYLOAD_TYPE:
        raise ValueError("mediaType or payloadType")
    payload = base64.b64decode(envelope["payload"], validate=True)
    (signature,) = envelope["signatures"]
    key_sha256 = value["verificationMaterial"]["publicKey"]["hint"]
    if not _SHA256.fullmatch(key_sha256):
        raise ValueError("verificationMaterial.publicKey.hint")
    return Bundle(
        key_sha256, payload, base64.b64decode(signature["sig"], validate=True), _listed(payload)
    )


def _listed(payload: bytes) -> dict[str, str]:
    """The files of a statement. The digest that it has of them is checked."""
    value = json.loads(payload)
    if (value["_type"], value["predicateType"]) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise ValueError("_type or predicateType")
    resources = value["predicate"]["resources"]
    files = {entry["name"]: entry["digest"] for entry in resources}
    if len(files) < len(resources) or any(entry["algorithm"] != "sha256" for entry in resources):
        raise ValueError("predicate.resources")
    if not all(_SHA256.fullmatch(sha256) for sha256 in files.values()):
        raise ValueError("predicate.resources.digest")
    (subject,) = value["subject"]
    digests = b"".join(bytes.fromhex(entry["digest"]) for entry in resources)
    if subject["digest"]["sha256"] != hashlib.sha256(digests).hexdigest():
        raise ValueError("subject.digest")
    return files
