"""Files are cut into lines whatever the chunks, and lines read or refused."""

from __future__ import annotations

import random
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from loraplex_services.gateway.batches.lines import CustomIds, read_line, split_lines
from loraplex_services.gateway.batches.results import Answer
from loraplex_services.gateway.batches.sending import retry_wait_s

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {}}


async def chunks(data: bytes, sizes: random.Random) -> AsyncIterator[bytes]:
    while data:
        size = sizes.randint(1, 12)
        yield data[:size]
        data = data[size:]


async def test_lines_do_not_depend_on_chunks() -> None:
    draw = random.Random(7)
    for _ in range(300):
        lines = [bytes(draw.choices(b"abc", k=draw.randint(0, 20))) for _ in range(8)]
        data = b"".join(line + draw.choice([b"\n", b"\r\n", b"\n\n"]) for line in lines)
        data = data.removesuffix(b"\n")
        want = [line if len(line) <= 10 else None for line in lines if line]
        got = [line async for line in split_lines(chunks(data, draw), 10)]
        assert got == want, data


@pytest.mark.hostile
async def test_empty_lines_are_passed_over_at_once() -> None:
    data = b"\n" * (4 << 20)

    async def lines() -> None:
        assert [line async for line in split_lines(chunks_of(data), 10)] == []

    async def one_by_one() -> None:
        assert not any(re.finditer(rb"[^\r\n]+", data))

    async def cpu_s(work: Callable[[], Awaitable[None]]) -> float:
        begin_s = time.thread_time()
        await work()
        return time.thread_time() - begin_s

    times = [(await cpu_s(lines), await cpu_s(one_by_one)) for _ in range(8)]
    ours_s, theirs_s = map(sum, zip(*times, strict=True))
    assert ours_s < 0.8 * theirs_s, times  # about 0.4; a search of each byte takes above 1


async def chunks_of(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1 << 20):
        yield data[start : start + (1 << 20)]


@pytest.mark.hostile
def test_the_longest_custom_ids_take_little_memory() -> None:
    seen = CustomIds()
    tracemalloc.start()
    try:
        for number in range(5000):
            assert seen.add(f"{number:012}" + "\N{GRINNING FACE}" * 500)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 1 << 20
    assert not seen.add(f"{7:012}" + "\N{GRINNING FACE}" * 500)


async def test_a_line_that_never_ends_takes_no_memory() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"x" * 1000
        yield b"\nshort"

    assert [line async for line in split_lines(endless(), 5000)] == [None, b"short"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "missing_custom_id"),
        ({**GOOD, "custom_id": 3}, "missing_custom_id"),
        ({**GOOD, "custom_id": "x" * 513}, "invalid_custom_id"),
        ({**GOOD, "method": "GET"}, "invalid_method"),
        ({**GOOD, "url": "/v1/y"}, "mismatched_url"),
        ({**GOOD, "url": ["/v1/x"]}, "mismatched_url"),
        ({**GOOD, "body": None}, "missing_body"),
        ({**GOOD, "priority": 1}, "unknown_field"),
    ],
)
def test_what_is_no_request_says_why(fields: dict[str, Any], code: str) -> None:
    line = read_line(6, fields, "/v1/x")
    assert line.error is not None and line.error.code == code
    assert "request 7 " in line.error.message
    assert read_line(0, GOOD, "/v1/x").error is None


@pytest.mark.parametrize(
    ("status", "retry_after_s", "attempt", "is_sent_again"),
    [
        (200, None, 1, False),
        (400, None, 1, False),
        (429, 2.0, 999, True),
        (429, None, 1, False),
        (503, 1.0, 999, True),
        (503, None, 1, True),
        (503, None, 3, False),
        (504, 1.0, 999, True),
        (500, None, 2, True),
        (500, None, 3, False),
    ],
)
def test_only_what_may_end_well_is_sent_again(
    status: int, retry_after_s: float | None, attempt: int, is_sent_again: bool
) -> None:
    wait_s = retry_wait_s(Answer(status, b"null", "r", retry_after_s), attempt)
    assert (wait_s is not None) == is_sent_again
    assert wait_s is None or (retry_after_s or 0.0) <= wait_s <= 30.0
