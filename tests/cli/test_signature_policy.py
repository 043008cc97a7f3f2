"""A tenant that demands signatures, or certificates: of uploads, of what tags point at; and how to
satisfy it."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_provenance import _keys

pytestmark = pytest.mark.e2e
OTHER = Path(__file__).parents[2] / "demo" / "adapters" / "upper"


def _demand(registry: Any, tenant: str, *public_keys: str) -> dict[str, Any]:
    flags = [word for key in public_keys for word in ("--require-signature-by", key)]
    tenant_now: dict[str, Any] = registry.json("tenants", "set", tenant, *flags)
    return tenant_now


def test_only_what_is_signed_by_a_demanded_key_is_published(
    registry: Any, adapter: Path, tmp_path: Path
) -> None:
    keys, other = _keys(tmp_path), _keys(tmp_path, name="other")
    _demand(registry, "strict", keys["public"])
    upload = ("upload", str(adapter), "--name", "strict/a")
    for extra in ((), ("--signing-key", other["private"]), ("--dry-run",)):
        code, error = registry.error(*upload, *extra)
        assert (code, error["reason"]) == (5, "NOT_SIGNED"), extra
    assert registry.error("show", "strict/a")[0] == 7
    published = registry.json(*upload, "--signing-key", keys["private"])
    assert published["version"] == 1
    [signer] = registry.json("show", "strict/a")["signers"]
    assert registry.json("verify", "strict/a")["key_sha256"] == signer
    [listed] = registry("list", "strict/a", "--json").stdout.splitlines()
    assert json.loads(listed)["signers"] == [signer]
    registry.json("reindex")
    assert registry.json("show", "strict/a")["signers"] == [signer]


def test_any_one_of_several_keys_is_enough_and_the_demand_can_end(
    registry: Any, adapter: Path, tmp_path: Path
) -> None:
    keys, other = _keys(tmp_path), _keys(tmp_path, name="other")
    assert len(_demand(registry, "either", keys["public"], other["public"])["signature_keys"]) == 2
    registry.json("upload", str(adapter), "--name", "either/a", "--signing-key", other["private"])
    registry.json("tenants", "set", "either", "--require-no-signature")
    assert registry.json("upload", str(OTHER), "--name", "either/a")["version"] == 2
    code, error = registry.error("verify", "either/a")
    assert (code, error["violations"][0]["field"]) == (2, "--public-key")


def test_tags_keep_away_from_older_unsigned_versions_until_they_are_signed(
    registry: Any, adapter: Path, tmp_path: Path
) -> None:
    keys = _keys(tmp_path)
    registry.json("upload", str(adapter), "--name", "late/a", "--tag", "prod")
    _demand(registry, "late", keys["public"])
    registry.json(
        *("upload", str(OTHER), "--name", "late/a", "--tag", "prod"),
        *("--signing-key", keys["private"]),
    )
    for move in (("tag", "late/a:v1", "prod"), ("split", "late/a", "prod", "v1=1", "v2=1")):
        code, error = registry.error(*move)
        assert (code, error["reason"]) == (5, "NOT_SIGNED"), move
    assert registry.error("rollback", "late/a", "prod")[0] == 7
    assert registry.json("show", "late/a:prod")["version"] == 2
    registry.json("sign", "late/a:v1", "--signing-key", keys["private"])
    assert registry.json("rollback", "late/a", "prod")["version"] == 1


def test_latest_does_not_fall_back_to_an_unsigned_version(
    registry: Any, adapter: Path, tmp_path: Path
) -> None:
    keys = _keys(tmp_path)
    registry.json("upload", str(adapter), "--name", "fall/a")
    _demand(registry, "fall", keys["public"])
    registry.json("upload", str(OTHER), "--name", "fall/a", "--signing-key", keys["private"])
    registry.json("delete", "fall/a:v2")
    assert registry.error("show", "fall/a")[0] == 7
    assert registry.json("show", "fall/a:v1")["version"] == 1


def test_a_signature_of_model_signing_in_the_folder_satisfies_the_demand(
    registry: Any, adapter: Path, tmp_path: Path
) -> None:
    model_signing = pytest.importorskip("model_signing")
    keys = _keys(tmp_path)
    _demand(registry, "interop", keys["public"])
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    bundle = folder / "model.sig"
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=[bundle])
    signer = model_signing.signing.Config().set_hashing_config(hashing)
    signer = signer.use_elliptic_key_signer(private_key=Path(keys["private"]))
    signer.sign(folder, bundle)
    assert registry.json("upload", str(folder), "--name", "interop/a")["version"] == 1
    assert len(registry.json("show", "interop/a")["signers"]) == 1

    value = json.loads(bundle.read_text())
    signature = value["dsseEnvelope"]["signatures"][0]
    forged = bytearray(base64.b64decode(signature["sig"]))
    forged[-1] ^= 1
    signature["sig"] = base64.b64encode(forged).decode()
    bundle.write_text(json.dumps(value))
    code, error = registry.error("upload", str(folder), "--name", "interop/b")
    assert (code, error["reason"]) == (5, "SIGNATURE_WRONG")


def test_a_demand_leaves_other_limits_alone_and_bad_keys_are_named(
    registry: Any, tmp_path: Path
) -> None:
    registry.json("tenants", "set", "limited", "--max-versions", "3", "--max-bytes", "5MiB")
    now = _demand(registry, "limited", _keys(tmp_path)["public"])
    assert (now["max_versions"], now["max_bytes"]) == (3, 5 << 20)
    code, error = registry.error("tenants", "set", "limited")
    assert code == 2 and "name a setting" in error["message"]
    now = registry.json("tenants", "set", "limited", "--max-bytes", "0")
    assert (now["max_versions"], now["max_bytes"], len(now["signature_keys"])) == (3, 0, 1)
    bad = tmp_path / "bad.pem"
    bad.write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    code, error = registry.error("tenants", "set", "limited", "--require-signature-by", str(bad))
    assert (code, error["violations"][0]["value"]) == (2, str(bad))


def test_a_bound_refuses_uploads_and_tags_with_status_3_until_a_version_is_certified(
    registry: Any, adapter: Path
) -> None:
    assert registry.json("tenants", "set", "bounded", "--max-kl", "0.05")["max_kl"] == 0.05
    upload = ("upload", str(adapter), "--name", "bounded/a")
    code, error = registry.error(*upload)
    assert (code, error["code"], error["reason"]) == (3, "FAILED_PRECONDITION", "NOT_CERTIFIED")
    registry.json(*upload, "--no-latest")
    code, error = registry.error("tag", "bounded/a:v1", "prod")
    assert (code, error["reason"]) == (3, "NOT_CERTIFIED")
    [violation] = error["violations"]
    assert (violation["field"], violation["value"]) == ("max_kl", "not measured")
