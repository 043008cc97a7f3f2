"""The records of the registry come out of their messages as they went in."""

from __future__ import annotations

import dataclasses

from loraplex.api import registry_wire
from loraplex.api.fields import same_fields
from loraplex.api.registry import Tag, TagTarget, UsageEntry
from loraplex.api.tenants import Tenant, TenantLimits
from loraplex.api.wire import to_message
from loraplex.v1 import registry_pb2 as pb

LIMITS = TenantLimits("t", 1, 2, 3.5, 4.5, 5, 0.5, ("key",))
USED = UsageEntry("2026-11-03", "t", "t/a", 1, 2, 3, 4, 5, 0.125)


def names_of(message_type: type) -> set[str]:
    return {field.name for field in message_type.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def test_every_field_of_the_wire_is_one_of_ours() -> None:
    for message, kind, others in (
        (pb.Tenant, Tenant, {}),
        (pb.TagTarget, TagTarget, {}),
        (pb.Tag, Tag, {}),
        (pb.UsageEntry, UsageEntry, {"duration_s": "duration_ms"}),
    ):
        ours = {others.get(field.name, field.name) for field in dataclasses.fields(kind)}
        assert names_of(message) == ours, kind


def test_a_tenant_comes_out_as_it_went_in() -> None:
    sent = Tenant(**same_fields(LIMITS, TenantLimits), used_bytes=7, used_versions=8)
    assert registry_wire.tenant(to_message(sent, pb.Tenant)) == sent


def test_usage_comes_out_as_it_went_in_to_the_millisecond() -> None:
    assert registry_wire.usage_entry(registry_wire.usage_entry_to_proto(USED)) == USED
    finer = dataclasses.replace(USED, duration_s=0.1254)
    assert registry_wire.usage_entry_to_proto(finer).duration_ms == 125


def test_targets_come_out_as_they_went_in() -> None:
    targets = (TagTarget(1, "sha256:a", 90), TagTarget(2, "sha256:b", 10))
    assert registry_wire.targets(registry_wire.targets_to_proto(targets)) == targets


def test_what_a_message_leaves_out_weighs_one() -> None:
    assert registry_wire.targets([pb.TagTarget(version=1)]) == (TagTarget(1, "", 1),)
    assert registry_wire.tenant(pb.Tenant(tenant="t")).fairness_weight == 1.0


def test_labels_are_ordered_by_key_whatever_the_order_in_the_message() -> None:
    keys = [f"key-{number}" for number in range(9)]
    sent = pb.AdapterVersion(labels=dict.fromkeys(keys, "x"))
    received = pb.AdapterVersion.FromString(sent.SerializeToString())
    assert list(registry_wire.adapter_version(received).labels) == keys
