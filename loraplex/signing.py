"""Signs and verifies with elliptic-curve keys in PEM files. Needs `cryptography`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.errors import DataLoss, InvalidRequest, PermissionDenied, Unsupported
from loraplex.signature_bundle import (
    Bundle,
    check_files,
    make_bundle,
    parse_bundle,
    signed_bytes,
    statement,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec


def sign(subject: str, files: Mapping[str, str], key: Path) -> tuple[bytes, str]:
    """Sign files (sha256 by path) with the private key in a PEM file; returns the bundle and the
    public key.

    Raises:
        InvalidRequest: the file is not an unencrypted EC P-256, P-384 or P-521 private key.
        Unsupported: `cryptography` is not installed.
    """
    private = _private_key(key)
    payload = statement(subject, files)
    public = private.public_key()
    signature = private.sign(signed_bytes(payload), _algorithm(public))
    return make_bundle(payload, signature, key_sha256(public)), public_pem(public)


def verify(raw: bytes, files: Mapping[str, str], public: ec.EllipticCurvePublicKey) -> Bundle:
    """Check that a bundle was signed with a key and covers exactly these files.

    Raises:
        PermissionDenied: another key signed it, or the signature is wrong.
        DataLoss: the signature is valid, but the files are not those that were signed.
    """
    from cryptography.exceptions import InvalidSignature

    bundle = parse_bundle(raw)
    try:
        public.verify(bundle.signature, signed_bytes(bundle.payload), _algorithm(public))
    except InvalidSignature:
        message = (
            f"the signature that names the key {bundle.key_sha256[:12]} was not made by "
            f"{key_sha256(public)[:12]}"
        )
        raise PermissionDenied(message, reason="SIGNATURE_WRONG") from None
    try:
        check_files(bundle, files)
    except InvalidRequest as error:
        raise DataLoss(f"signed, but not these files: {error.message}") from None
    return bundle


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key in a PEM file, which may also hold a private key."""
    raw = _read(path)
    if b"PRIVATE KEY" in raw:
        return _private_key(path).public_key()
    return parse_public_key(raw, "key file", str(path))


def parse_public_key(pem: bytes, field: str, value: str) -> ec.EllipticCurvePublicKey:
    """Parse a public key in PEM form. Raises InvalidRequest naming `field` and `value`."""
    _require()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidRequest.field(field, value, "is not an EC public key in PEM form")
    _algorithm(key)
    return key


def public_pem(public: ec.EllipticCurvePublicKey) -> str:
    """The PEM of a key in one canonical form."""
    from cryptography.hazmat.primitives import serialization

    return public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()


def key_sha256(public: ec.EllipticCurvePublicKey) -> str:
    """The identifier of a key in bundles: sha256 of its PEM."""
    return hashlib.sha256(public_pem(public).encode()).hexdigest()


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    _require()
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        description = (
            "is not an unencrypted EC private key in PEM; make one with 'openssl ecparam -genkey "
            "-name prime256v1 -noout'"
        )
        raise InvalidRequest.field("key file", str(path), description)
    return key


def _algorithm(public: ec.EllipticCurvePublicKey) -> ec.ECDSA:
    """The hash function that is used with the curve."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    by_curve: dict[str, hashes.HashAlgorithm] = {
        "secp256r1": hashes.SHA256(),
        "secp384r1": hashes.SHA384(),
        "secp521r1": hashes.SHA512(),
    }
    if public.curve.name not in by_curve:
        description = "is not a curve of the format; use P-256, P-384 or P-521"
        raise InvalidRequest.field("key file", public.curve.name, description)
    return ec.ECDSA(by_curve[public.curve.name])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest.field("key file", str(path), f"cannot be read: {error}") from None


def _require() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise Unsupported.without("cryptography") from None
