"""Signing with, and verifying by, elliptic-curve keys in PEM files. Needs `cryptography`."""

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


def sign(subject: str, files: Mapping[str, str], key: Path) -> bytes:
    """A bundle over files (sha256 by path), by the private key in a PEM file.

    Raises:
        InvalidRequest: the file is no unencrypted EC P-256, P-384 or P-521 private key.
        Unsupported: `cryptography` is not installed.
    """
    private = _private_key(key)
    payload = statement(subject, files)
    signature = private.sign(signed_bytes(payload), _algorithm(private.public_key()))
    return make_bundle(payload, signature, key_sha256(private.public_key()))


def verify(raw: bytes, files: Mapping[str, str], key: Path) -> Bundle:
    """Check that a bundle is by the public key in a PEM file, over exactly these files.

    Raises:
        PermissionDenied: another key signed it, or the signature is wrong.
        DataLoss: the signature is right and the files are not those that were signed.
    """
    from cryptography.exceptions import InvalidSignature

    public = public_key(key)
    bundle = parse_bundle(raw)
    try:
        public.verify(bundle.signature, signed_bytes(bundle.payload), _algorithm(public))
    except InvalidSignature:
        message = f"the signature by {bundle.key_sha256[:12]} was not made by the key in {key}"
        raise PermissionDenied(message, reason="SIGNATURE_WRONG") from None
    try:
        check_files(bundle, files)
    except InvalidRequest as error:
        raise DataLoss(f"signed, but not these files: {error.message}") from None
    return bundle


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key of a PEM file; of a private one too."""
    _require()
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    raw = _read(path)
    if b"PRIVATE KEY" in raw:
        return _private_key(path).public_key()
    try:
        key = load_pem_public_key(raw)
    except ValueError:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidRequest.field("key file", str(path), "is no EC public key in PEM")
    return key


def key_sha256(public: ec.EllipticCurvePublicKey) -> str:
    """How bundles name a key: sha256 of its PEM."""
    from cryptography.hazmat.primitives import serialization

    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(pem).hexdigest()


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
            "is no unencrypted EC private key in PEM; make one with 'openssl ecparam -genkey "
            "-name prime256v1 -noout'"
        )
        raise InvalidRequest.field("key file", str(path), description)
    return key


def _algorithm(public: ec.EllipticCurvePublicKey) -> ec.ECDSA:
    """The hash that goes with the curve."""
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
        message = "signing needs the 'cryptography' package: pip install 'loraplex[sign]'"
        raise Unsupported(message) from None
