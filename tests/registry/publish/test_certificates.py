"""Certificates are kept with versions, replaced by later ones, and checked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.api.registry import Certificate
from loraplex.errors import InvalidRequest, NotFound, ResourceExhausted
from tests.registry.conftest import ServedRegistry
from tests.registry.house import publish

MEASURED = Certificate("example/tiny", "bf16 at host:1", "ab" * 32, 400, 0.01, 0.3, 0.99)


async def test_the_latest_certificate_of_each_subject_is_kept(served: ServedRegistry) -> None:
    await publish(served.registry, "acme/a", 1)
    await publish(served.registry, "acme/a", 2)
    client, other = served.client, replace(MEASURED, reference="another")
    await client.admin.set_certificate("acme/a:v1", other)
    await client.admin.set_certificate("acme/a:v1", replace(MEASURED, mean_kl=0.2))
    stored = await client.admin.set_certificate("acme/a:v1", MEASURED)
    assert stored.created_unix_s > 0
    found = await client.admin.certificates("acme/a:v1")
    assert [one.reference for one in found] == ["another", MEASURED.reference]
    assert found[1] == stored
    assert await client.admin.certificates("acme/a:v2") == []
    actions = [entry.action async for entry in client.admin.audit("acme")]
    assert actions.count("version.certify") == 3


async def test_each_scheme_has_its_own(
    served: ServedRegistry,
) -> None:
    await publish(served.registry, "acme/a", 1)
    for scheme, mean_kl in (("int8", 0.02), ("", 0.01), ("int4", 0.04), ("int4", 0.05)):
        measured = replace(MEASURED, quantization=scheme, mean_kl=mean_kl)
        await served.client.admin.set_certificate("acme/a", measured)
    found = await served.client.admin.certificates("acme/a")
    assert [(one.quantization, one.mean_kl) for one in found] == [
        ("", 0.01),
        ("int4", 0.05),
        ("int8", 0.02),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_id", ""),
        ("reference", "two\nlines"),
        ("reference", "x" * 201),
        ("probe_sha256", "AB" * 32),
        ("probe_sha256", "../../versions"),
        ("num_tokens", 0),
        ("mean_kl", float("nan")),
        ("mean_kl", -0.1),
        ("max_kl", float("inf")),
        ("top1_agreement", 1.1),
        ("quantization", "int8\nint4"),
    ],
)
async def test_what_nobody_can_have_measured_is_refused_by_name(
    served: ServedRegistry, field: str, value: object
) -> None:
    await publish(served.registry, "acme/a", 1)
    with pytest.raises(InvalidRequest) as refused:
        await served.client.admin.set_certificate("acme/a", replace(MEASURED, **{field: value}))
    assert refused.value.violations[0].field == f"certificate.{field}"
    assert await served.client.admin.certificates("acme/a") == []


async def test_a_version_has_few_and_must_exist(served: ServedRegistry) -> None:
    await publish(served.registry, "acme/a", 1)
    for number in range(32):
        await served.client.admin.set_certificate(
            "acme/a", replace(MEASURED, reference=str(number))
        )
    await served.client.admin.set_certificate("acme/a", replace(MEASURED, reference="7"))
    with pytest.raises(ResourceExhausted, match="32"):
        await served.client.admin.set_certificate("acme/a", MEASURED)
    with pytest.raises(NotFound):
        await served.client.admin.set_certificate("acme/b", MEASURED)
