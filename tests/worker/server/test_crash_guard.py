"""Who is let in after an engine died."""

from __future__ import annotations

import pytest

from loraplex.api.request import AdapterSet
from loraplex.errors import LoraplexError
from loraplex_services.worker.server.crash_guard import MAX_SUSPECTS, CrashGuard, crash_key

A = AdapterSet((("sha256:a", 1.0),))


class Stage:
    """A guard and whom it let in, in order."""

    def __init__(self) -> None:
        self.guard = CrashGuard()
        self.sent: list[str] = []

    def admit(self, *names: str) -> None:
        for name in names:
            self.guard.check(name.encode())
            self.guard.admit(name, name.encode(), lambda name=name: self.sent.append(name))


def test_keys_follow_prompt_and_adapters() -> None:
    assert crash_key([1, 2], A) == crash_key([1, 2], A)
    assert len({crash_key([1, 2], A), crash_key([1, 2], AdapterSet()), crash_key([12], A)}) == 3


def test_the_unsuspected_come_in_at_once_and_suspects_one_by_one() -> None:
    stage = Stage()
    stage.guard.crashed([b"a", b"b", b"c"])
    stage.admit("a", "b", "new", "c")
    assert stage.sent == ["a", "new"]
    stage.guard.settled("new")
    assert stage.sent == ["a", "new"]
    stage.guard.settled("a")
    assert stage.sent == ["a", "new", "b"]
    stage.guard.settled("b")
    assert stage.sent == ["a", "new", "b", "c"]


def test_only_the_request_on_trial_is_blamed_for_the_second_death() -> None:
    stage = Stage()
    stage.guard.crashed([b"bad", b"good"])
    stage.admit("bad", "good")
    stage.guard.engine_lost()
    stage.guard.crashed([b"bad"])
    stage.admit("good")
    assert stage.sent == ["bad", "good"]
    with pytest.raises(LoraplexError, match="crashed 2 times") as caught:
        stage.admit("bad")
    assert caught.value.reason == "ENGINE_CRASHED"


def test_a_request_that_finishes_is_cleared() -> None:
    stage = Stage()
    stage.guard.crashed([b"a"])
    stage.guard.finished(b"a")
    stage.guard.crashed([b"a"])
    stage.admit("a")
    assert stage.sent == ["a"]


def test_a_held_suspect_that_is_cancelled_is_never_let_in() -> None:
    stage = Stage()
    stage.guard.crashed([b"a", b"b", b"c"])
    stage.admit("a", "b", "c")
    stage.guard.settled("b")
    stage.guard.settled("a")
    assert stage.sent == ["a", "c"]


def test_the_list_of_suspects_is_bounded() -> None:
    guard = CrashGuard()
    for index in range(MAX_SUSPECTS + 10):
        guard.crashed([str(index).encode()] * 3)
    guard.crashed([b"0"])
    guard.check(b"0")
