"""The state folder has one owner and one layout, and keeps what it does not know."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from loraplex.errors import AlreadyExists, InvalidRequest
from loraplex_services.up.state import StateDir


def test_second_owner_is_told_who_the_first_is(tmp_path: Path) -> None:
    first = StateDir(tmp_path / "s")
    with pytest.raises(AlreadyExists, match=f"process {os.getpid()}"):
        StateDir(tmp_path / "s")
    first.release()
    StateDir(tmp_path / "s").release()


def test_stamp_is_written_once_and_another_layout_is_refused(tmp_path: Path) -> None:
    StateDir(tmp_path).release()
    stamp = tmp_path / "layout.json"
    assert json.loads(stamp.read_text()) == {"layout": 1}
    for text in ('{"layout": 2}', "garbage", "[]"):
        stamp.write_text(text)
        with pytest.raises(InvalidRequest, match="layout"):
            StateDir(tmp_path)
        assert stamp.read_text() == text


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    StateDir(tmp_path).release()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_killed_workers_left_is_gone_at_the_next_start(tmp_path: Path) -> None:
    first = StateDir(tmp_path / "s")
    (first.scratch / "loraplex-ranks-x").mkdir()
    (first.cache / "worker-0").mkdir()
    first.release()
    second = StateDir(tmp_path / "s")
    assert list(second.scratch.iterdir()) == []
    assert (second.cache / "worker-0").is_dir(), "adapters that were fetched are kept"
    second.release()


def test_sockets_are_private_with_short_paths(tmp_path: Path) -> None:
    for folder in (Path("/tmp") / f"s{os.getpid()}", tmp_path / ("deep" * 30)):
        state = StateDir(folder)
        assert stat.S_IMODE(state.sockets.stat().st_mode) == 0o700
        assert len(os.fsencode(state.sockets / "worker-63.sock")) <= 100
        state.release()
        assert state.sockets.exists() == (state.sockets.parent == folder), "nothing stays elsewhere"


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequest, match="--state-dir"):
        StateDir(tmp_path / "file" / "state")
