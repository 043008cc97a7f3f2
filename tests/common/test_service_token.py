"""Methods that only services may call."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.errors import InvalidRequest, Unauthenticated
from loraplex_services.common.security.service_token import ServiceAuth, read_service_token


async def test_the_right_token_enters() -> None:
    auth = ServiceAuth("secret")
    assert (await auth.check("/s/m", {"authorization": "Bearer secret"})).tenant == "default"
    assert await auth.check("/s/m", {"authorization": "bearer secret"})


@pytest.mark.parametrize("shown", ["new", "old"])
async def test_every_line_of_the_file_is_accepted(shown: str) -> None:
    assert await ServiceAuth("new\nold").check("/s/m", {"authorization": f"Bearer {shown}"})


@pytest.mark.parametrize("shown", ["", "secret", "Bearer ", "Bearer wrong", "Basic secret"])
async def test_anything_else_stays_out(shown: str) -> None:
    with pytest.raises(Unauthenticated):
        await ServiceAuth("secret").check("/s/m", {"authorization": shown})


async def test_no_metadata_stays_out() -> None:
    with pytest.raises(Unauthenticated):
        await ServiceAuth("secret").check("/s/m", {})


def test_the_token_is_read_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert read_service_token(tmp_path / "token") == "secret"
    assert read_service_token(None) == ""


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_missing_or_empty_file_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(InvalidRequest) as caught:
        read_service_token(tmp_path / "token")
    assert caught.value.violations[0].field == "LORAPLEX_SERVICE_TOKEN_FILE"
