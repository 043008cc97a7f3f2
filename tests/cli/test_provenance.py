"""Signing and verifying versions, checked with the `model_signing` package itself."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from loraplex.errors import InvalidRequest, PermissionDenied
from loraplex.signature_bundle import parse_bundle
from loraplex.signing import public_key, sign, verify

FILES = {"adapter_config.json": "1" * 64, "adapter_model.safetensors": "2" * 64}


def _keys(folder: Path, curve: ec.EllipticCurve | None = None, name: str = "key") -> dict[str, str]:
    """Paths of a fresh key pair."""
    private = ec.generate_private_key(curve or ec.SECP256R1())
    pem = serialization.Encoding.PEM
    paths = {"private": folder / f"{name}.pem", "public": folder / f"{name}.pub"}
    plain = serialization.NoEncryption()
    paths["private"].write_bytes(
        private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    )
    paths["public"].write_bytes(
        private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return {side: str(path) for side, path in paths.items()}


@pytest.mark.e2e
def test_a_signature_is_kept_and_verifies_by_its_key_only(
    registry: Any, adapter: Path, tmp_path: Path
) -> None:
    keys, other = _keys(tmp_path), _keys(tmp_path, name="other")
    registry.json("upload", str(adapter), "--name", "signed", "--tag", "prod")
    code, error = registry.error("verify", "signed:prod", "--public-key", keys["public"])
    assert (code, error["reason"]) == (5, "NOT_SIGNED")
    nowhere = str(tmp_path / "nowhere" / "bundle")
    words = ("sign", "signed:prod", "--signing-key", keys["private"], "--out")
    assert registry.error(*words, nowhere)[0] == 2
    assert registry.error(*words, str(tmp_path))[0] == 2
    assert registry.error("verify", "signed", "--public-key", keys["public"])[0] == 5
    signed = registry.json("sign", "signed:prod", "--signing-key", keys["private"])
    assert (signed["name"], signed["version"]) == ("signed", 1)
    verified = registry.json("verify", "signed", "--public-key", keys["public"])
    assert verified["key_sha256"] == signed["key_sha256"]
    assert registry.error("verify", "signed", "--public-key", other["public"])[0] == 5
    registry.json("reindex")
    registry.json("sign", "signed", "--signing-key", other["private"])
    assert registry.json("verify", "signed", "--public-key", other["public"])["version"] == 1
    assert registry.json("verify", "signed", "--public-key", keys["public"])["version"] == 1


@pytest.mark.e2e
@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_model_signing_verifies_a_pulled_folder_by_our_bundle(
    registry: Any, adapter: Path, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    model_signing = pytest.importorskip("model_signing")
    keys = _keys(tmp_path, curve)
    registry.json("upload", str(adapter), "--name", "interop")
    folder = tmp_path / "pulled"
    registry.json("pull", "interop", str(folder))
    bundle = folder / "model.sig"
    registry.json("sign", "interop", "--signing-key", keys["private"], "--out", str(bundle))
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=[bundle])
    verifier = model_signing.verifying.Config().set_hashing_config(hashing)
    verifier = verifier.use_elliptic_key_verifier(public_key=Path(keys["public"]))
    verifier.verify(folder, bundle)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError):
        verifier.verify(folder, bundle)


def test_a_bundle_of_model_signing_verifies_here(adapter: Path, tmp_path: Path) -> None:
    model_signing = pytest.importorskip("model_signing")
    from loraplex.adapter_format import read_folder

    keys = _keys(tmp_path)
    bundle = tmp_path / "model.sig"
    signer = model_signing.signing.Config().use_elliptic_key_signer(
        private_key=Path(keys["private"])
    )
    signer.sign(adapter, bundle)
    files = {file.path: file.sha256 for file in read_folder(adapter).files}
    verify(bundle.read_bytes(), files, public_key(Path(keys["public"])))


def test_changed_payloads_and_other_keys_do_not_verify(tmp_path: Path) -> None:
    keys, other = _keys(tmp_path), _keys(tmp_path, name="other")
    raw, _ = sign("acme/a:v1", FILES, Path(keys["private"]))
    verify(raw, FILES, public_key(Path(keys["public"])))
    with pytest.raises(PermissionDenied):
        verify(raw, FILES, public_key(Path(other["public"])))
    value = json.loads(raw)
    payload = base64.b64decode(value["dsseEnvelope"]["payload"])
    changed = payload.replace(b"acme/a:v1", b"acme/b:v1")
    value["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
    with pytest.raises(PermissionDenied):
        verify(json.dumps(value).encode(), FILES, public_key(Path(keys["public"])))


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b'{"mediaType": 1}', b"\xff" * 10, b"[" * 5000, b"x" * (1 << 20)]
)
def test_what_is_no_bundle_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_bundle(raw)


def test_what_is_no_key_is_refused_with_the_way_to_make_one(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    with pytest.raises(InvalidRequest, match="openssl ecparam"):
        sign("a", FILES, bad)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        sign("a", FILES, tmp_path / "missing.pem")


@pytest.mark.e2e
def test_a_signature_over_other_files_is_not_kept(
    registry: Any, adapter: Path, tmp_path: Path
) -> None:
    import asyncio

    from loraplex.client.registry_client import RegistryClient

    registry.json("upload", str(adapter), "--name", "mismatched")
    raw, _ = sign("x", FILES, Path(_keys(tmp_path)["private"]))

    async def attach() -> None:
        async with RegistryClient(registry.variables["LORAPLEX_REGISTRY_ADDRESS"]) as client:
            await client.attach_signature("mismatched", raw)

    with pytest.raises(InvalidRequest, match="adapter_config"):
        asyncio.run(attach())
