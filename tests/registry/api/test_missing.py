"""Calls that change an adapter say what they miss, as reads do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.client.registry_client import RegistryClient
from loraplex.errors import AdapterNotFound
from tests.registry.conftest import ServedRegistry
from tests.registry.house import upload

TAG = ": default/sql has no tag nope (tags: latest, prod; versions: v1)"
VERSION = ": default/sql has no version v9 (versions: v1)"
NAME = "no adapter 'default/sq': there is no adapter default/sq; did you mean default/sql?"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda client: client.rollback("sql", "nope"), TAG),
        (lambda client: client.tag_history("sql", "nope"), TAG),
        (lambda client: client.delete_tag("sql", "nope"), TAG),
        (lambda client: client.rollback("sql", "prod", 9), VERSION),
        (lambda client: client.set_tag("sql", "prod", {1: 1, 9: 1}), VERSION),
        (lambda client: client.set_tag("sql", "prod", {9: 1}, when_loaded_s=1), VERSION),
        (lambda client: client.delete("sql:v9"), VERSION),
        (lambda client: client.delete("sq", every=True), NAME),
        (lambda client: client.delete("sq:v1"), NAME),
        (lambda client: client.tag_history("sq", "prod"), NAME),
        (lambda client: client.set_sharing("sq", "public"), NAME),
        (lambda client: client.describe("sq", "words"), NAME),
    ],
)
async def test_a_refused_change_says_which_tags_versions_and_names_exist(
    served: ServedRegistry,
    tmp_path: Path,
    call: Callable[[RegistryClient], Awaitable[Any]],
    why: str,
) -> None:
    await upload(served.client, tmp_path, "sql", 1, tags=["prod"])
    with pytest.raises(AdapterNotFound) as refused:
        await call(served.client)
    assert refused.value.message.endswith(why)
