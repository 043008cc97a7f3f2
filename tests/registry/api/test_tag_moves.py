"""SetTag: a request asks for one move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.errors import InvalidRequest
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.registry.api import convert
from tests.registry.conftest import ServedRegistry
from tests.registry.house import upload


@pytest.mark.parametrize(
    ("move", "field"),
    [
        ({"delete": True, "targets": [pb.TagTarget(version=1)]}, "targets"),
        ({"rollback": True, "targets": [pb.TagTarget(version=1)]}, "targets"),
        ({"rollback": True, "delete": True}, "rollback"),
        ({"rollback_version": 1, "delete": True}, "rollback_version"),
        ({"targets": [pb.TagTarget(weight=1)]}, "targets"),
        ({"targets": [pb.TagTarget(version=1, digest="sha256:" + "1" * 64)]}, "targets.digest"),
    ],
)
async def test_a_tag_is_left_where_it_is_if_the_fields_contradict_each_other(
    served: ServedRegistry, tmp_path: Path, move: dict[str, Any], field: str
) -> None:
    await upload(served.client, tmp_path, "sql", 1, tags=["prod"])
    request = pb.SetTagRequest(name="sql", tag="prod", **move)
    with pytest.raises(InvalidRequest) as refused:
        await served.client._channel.call(served.client._stub.SetTag, request)
    assert [violation.field for violation in refused.value.violations] == [field]
    [moved] = await served.client.tag_history("sql", "prod")
    assert [target.version for target in moved.targets] == [1]


async def test_the_time_that_a_staged_move_has_left_is_counted_when_it_is_sent(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upload(served.client, tmp_path, "sql", 1)
    staged = await served.client.set_tag("sql", "prod", {1: 1}, when_loaded_s=60)
    assert 0 < staged.pending_left_s <= 60
    for left_s in (7.0, -1.0):
        now_s = staged.pending_until_unix_s - left_s
        monkeypatch.setattr(convert, "now_s", lambda now_s=now_s: now_s)
        tags = (await served.client.get("sql:v1")).tags
        [found] = [tag for tag in tags if tag.tag == "prod"]
        assert found.pending_left_s == pytest.approx(max(left_s, 0.0), abs=1e-3)
