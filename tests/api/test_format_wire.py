"""What crosses the wire comes back as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.adapter_format import File
from loraplex.api import format_wire
from loraplex.errors import InvalidRequest
from loraplex.v1 import common_pb2, registry_pb2
from tests.adapter_format.builders import tiny_geometry


def test_a_geometry_survives_the_wire() -> None:
    tiny = tiny_geometry()
    fixed = replace(tiny.modules[0], is_fixed=True)
    geometry = replace(tiny, modules=(fixed, *tiny.modules[1:]))
    raw = format_wire.geometry_to_proto(geometry).SerializeToString()
    assert format_wire.geometry_from_proto(common_pb2.ModelGeometry.FromString(raw)) == geometry


def test_files_survive_the_wire() -> None:
    files = (File("README.md", 2**40, "0" * 64), File("adapter_config.json", 1, "1" * 64))
    sent = [registry_pb2.FileSpec(path=f.path, size=f.size, sha256=f.sha256) for f in files]
    assert format_wire.files_from_proto(sent) == files


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m.ClearField("fingerprint"), "geometry.fingerprint"),
        (lambda m: m.ClearField("modules"), "geometry.modules"),
        (lambda m: m.modules[0].ClearField("kind"), "geometry.modules.lm_head.kind"),
    ],
)
def test_half_a_geometry_is_refused_by_its_field(change: object, field: str) -> None:
    message = format_wire.geometry_to_proto(tiny_geometry())
    assert callable(change)
    change(message)
    with pytest.raises(InvalidRequest) as caught:
        format_wire.geometry_from_proto(message)
    assert caught.value.violations[0].field == field
