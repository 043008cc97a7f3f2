"""When a request counts as long, by its base's rotary embedding or its adapter's."""

from __future__ import annotations

import pytest

from loraplex_services.worker.types.request import OwnRope
from tests.worker.scheduling.stage import Stage, make_request


def test_a_request_that_outgrows_the_short_rotation_is_computed_anew_once() -> None:
    stage = Stage(rope_switch_len=10)
    request = make_request("grows", num_prompt=8, max_tokens=6)
    stage.submit(request)
    starts = []
    while not stage.finished:
        starts += [(row.start, row.num_tokens) for row in stage.step().rows]
    assert starts == [(0, 8), (8, 1), (9, 1), (0, 11), (11, 1), (12, 1)]


@pytest.mark.parametrize("base_switch_len", [None, 10])
@pytest.mark.parametrize(("own", "anew"), [(11, True), (None, False)])
def test_the_rope_that_an_adapter_brings_says_when_a_request_is_long(
    base_switch_len: int | None, own: int | None, anew: bool
) -> None:
    stage = Stage(rope_switch_len=base_switch_len)
    request = make_request("grows", num_prompt=8, max_tokens=6)
    request.rope = OwnRope("own", own)
    stage.submit(request)
    starts = []
    while not stage.finished:
        starts += [row.start for row in stage.step().rows]
    assert starts == ([0, 8, 9, 10, 0, 12] if anew else [0, 8, 9, 10, 11, 12])


def test_long_and_short_requests_share_no_prefix() -> None:
    stage = Stage(rope_switch_len=10)
    for name, num_prompt in (("short", 9), ("long", 12), ("long again", 12)):
        request = make_request(name, num_prompt=num_prompt, max_tokens=1)
        stage.submit(request)
        while name not in stage.finished:
            stage.step()
        assert request.num_cached == (8 if name == "long again" else 0)
