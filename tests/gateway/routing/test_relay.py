"""The relay on its own: each position once and in order, whatever workers send."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.output import FinishReason, TokenLogprob
from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex.errors import DeadlineExceeded, InvalidRequest, LoraplexError, Unavailable
from loraplex_services.gateway.request import Tokens, WorkerJob
from loraplex_services.gateway.routing.relay import Relay, RelayLimits
from loraplex_services.gateway.routing.steering import Steering
from loraplex_services.gateway.workers.token_stream import TokenStream, WakeupPacer
from loraplex_services.gateway.workers.view import WorkerView
from tests.gateway.conftest import eventually
from tests.virtual_time import run_virtually

OUTPUT = tuple(range(100, 110))
Feed = Callable[[TokenStream, WorkerJob], None]


class WorkerPool:
    """A fleet of two whose placements are fed from a list."""

    def __init__(self, *feeds: Feed) -> None:
        self.feeds = list(feeds)
        self.jobs: list[WorkerJob] = []
        self.addresses: list[str] = []
        self.num_cancelled = 0
        self.names = ["a", "b"]

    def views(self, base_id: str | None = None) -> list[WorkerView]:
        return [WorkerView(name, name, "base", connected=True, ready=True) for name in self.names]

    def submit(self, address: str, job: WorkerJob) -> TokenStream:
        self.jobs.append(job)
        self.addresses.append(address)
        stream = TokenStream(self._cancelled)
        self.feeds.pop(0)(stream, job)
        return stream

    def _cancelled(self) -> None:
        self.num_cancelled += 1

    async def next_change(self) -> None:
        await asyncio.sleep(0.01)


def _job(*adapters: tuple[str, float], deadline_s: float = 1e9) -> WorkerJob:
    request = WorkerRequest(
        request_id="r",
        tenant="t",
        prompt_ids=(1, 2),
        adapters=AdapterSet(adapters),
        sampling=SamplingParams(max_tokens=len(OUTPUT), seed=1, prompt_logprobs=0),
    )
    return WorkerJob(request, "base", deadline_s)


def _send(start: int, end: int) -> Feed:
    """Tokens [start, end) of the output, one event; finished at its end."""

    def feed(stream: TokenStream, job: WorkerJob) -> None:
        finish = FinishReason.LENGTH if end == len(OUTPUT) else None
        logprobs = tuple(TokenLogprob(i, -1.0) for i in OUTPUT[start:end])
        stream.put(Tokens(OUTPUT[start:end], start, logprobs, finish_reason=finish))

    return feed


def _fail(error: LoraplexError) -> Feed:
    return lambda stream, job: stream.fail(error)


def _both(*feeds: Feed) -> Feed:
    def feed(stream: TokenStream, job: WorkerJob) -> None:
        for each in feeds:
            each(stream, job)

    return feed


async def _ids(
    workers: WorkerPool, job: WorkerJob | None = None, limits: RelayLimits | None = None
) -> tuple[int, ...]:
    out: list[int] = []
    async for tokens in Relay(workers, limits or RelayLimits()).stream(job or _job()):
        assert tokens.position == len(out)
        assert [entry.token_id for entry in tokens.logprobs] == list(tokens.token_ids)
        out += tokens.token_ids
    return tuple(out)


AWAY = Unavailable("gone")


@given(cuts=st.lists(st.integers(0, len(OUTPUT) - 1), max_size=4))
def test_every_position_comes_once_across_failures(cuts: list[int]) -> None:
    """Each placement begins where the last one ended, as its output_ids say."""
    workers = WorkerPool()
    positions = [0, *sorted(cuts), len(OUTPUT)]
    for start, end in itertools.pairwise(positions):
        last = end == len(OUTPUT)
        workers.feeds.append(_send(start, end) if last else _both(_send(start, end), _fail(AWAY)))
    assert run_virtually(_ids(workers)) == OUTPUT
    emitted = [job.request.output_ids for job in workers.jobs]
    assert [len(ids) for ids in emitted] == positions[: len(emitted)]
    assert all(ids == OUTPUT[: len(ids)] for ids in emitted)


async def test_tokens_sent_twice_are_dropped() -> None:
    workers = WorkerPool(_both(_send(0, 4), _fail(AWAY)), _both(_send(2, 6), _send(6, 10)))
    assert await _ids(workers) == OUTPUT


def test_gap_means_another_attempt() -> None:
    workers = WorkerPool(_send(3, 6), _send(0, 10))
    assert run_virtually(_ids(workers)) == OUTPUT
    assert workers.num_cancelled == 2


async def test_request_that_the_worker_cancels_is_sent_again() -> None:
    def give_up(stream: TokenStream, job: WorkerJob) -> None:
        stream.put(Tokens((), 4, finish_reason=FinishReason.CANCELLED))

    def go_on(stream: TokenStream, job: WorkerJob) -> None:
        _send(len(job.request.output_ids), len(OUTPUT))(stream, job)

    assert await _ids(WorkerPool(_both(_send(0, 4), give_up), go_on)) == OUTPUT


async def test_continuation_asks_for_no_prompt_logprobs_and_another_worker() -> None:
    workers = WorkerPool(_both(_send(0, 4), _fail(AWAY)), _send(4, 10))
    await _ids(workers)
    assert [job.request.sampling.prompt_logprobs for job in workers.jobs] == [0, None]
    assert len(set(workers.addresses)) == 2


async def test_a_version_that_a_worker_cannot_load_after_all_is_left_again() -> None:
    old, new = AdapterSet((("v1", 1.0),)), AdapterSet((("v2", 1.0),))
    error = LoraplexError("not copied", reason="ADAPTER_LOAD_FAILED")
    workers = WorkerPool(_send(0, 4), _fail(error), _send(4, 10))
    steering, ids = Steering(old), []
    async for tokens in Relay(workers).stream(_job(("v1", 1.0)), steering):
        if not ids:
            steering.switch(new)
        ids += tokens.token_ids
    assert tuple(ids) == OUTPUT
    assert [job.request.adapters for job in workers.jobs] == [old, new, old]


def test_a_version_that_no_worker_can_fetch_is_left_again() -> None:
    """The worker that had fetched it dies while the object store is away."""
    old, new = AdapterSet((("v1", 1.0),)), AdapterSet((("v2", 1.0),))
    no_store = Unavailable("no store", reason="OBJECT_STORE_UNAVAILABLE")
    workers = WorkerPool(_send(0, 4), _fail(AWAY), _fail(no_store), _send(4, 10))
    steering, ids = Steering(old), []

    async def read() -> None:
        async for tokens in Relay(workers).stream(_job(("v1", 1.0)), steering):
            if not ids:
                steering.switch(new)
            ids.extend(tokens.token_ids)

    run_virtually(read())
    assert tuple(ids) == OUTPUT
    assert [job.request.adapters for job in workers.jobs] == [old, new, new, old]


async def test_an_error_of_the_version_that_a_request_runs_with_passes() -> None:
    new = AdapterSet((("v2", 1.0),))
    workers = WorkerPool(_send(0, 4), _both(_send(4, 6), _fail(InvalidRequest("no"))))
    steering = Steering(AdapterSet((("v1", 1.0),)))
    with pytest.raises(InvalidRequest):
        async for _ in Relay(workers).stream(_job(("v1", 1.0)), steering):
            if steering.adapters != new:
                steering.switch(new)
    assert len(workers.jobs) == 2


async def test_other_errors_pass() -> None:
    workers = WorkerPool(_both(_send(0, 4), _fail(InvalidRequest("no"))))
    with pytest.raises(InvalidRequest):
        await _ids(workers)
    assert len(workers.jobs) == 1


def test_failures_without_progress_are_bounded() -> None:
    workers = WorkerPool(*[_fail(AWAY)] * 50)
    with pytest.raises(Unavailable):
        run_virtually(_ids(workers))
    assert len(workers.jobs) == RelayLimits().max_failures + 1


async def test_accepted_request_waits_for_a_worker_to_come_back() -> None:
    workers = WorkerPool(_both(_send(0, 4), _fail(AWAY)), _send(4, 10))
    relay = Relay(workers)
    out: list[int] = []
    async for tokens in relay.stream(_job()):
        out += tokens.token_ids
        if len(out) == 4:
            workers.names = []
            asyncio.get_running_loop().call_later(0.1, workers.names.append, "c")
    assert tuple(out) == OUTPUT
    assert workers.addresses[-1] == "c"


async def test_accepted_request_gives_up_waiting_after_its_limit() -> None:
    workers = WorkerPool(_both(_send(0, 4), _fail(AWAY)))
    relay = Relay(workers, RelayLimits(wait_for_worker_s=0.05))
    with pytest.raises(Unavailable) as caught:
        async for _ in relay.stream(_job()):
            workers.names = []
    assert caught.value.reason == "NO_READY_WORKER"


def test_every_worker_is_tried_before_one_is_tried_again() -> None:
    workers = WorkerPool(*[_fail(AWAY)] * 2, _send(0, 10))
    workers.names = ["a", "b", "c"]
    assert run_virtually(_ids(workers)) == OUTPUT
    assert sorted(workers.addresses) == ["a", "b", "c"]


def test_stream_that_has_begun_outlives_more_failures_than_one_that_has_not() -> None:
    limits = RelayLimits(max_failures=1)
    workers = WorkerPool(_both(_send(0, 4), _fail(AWAY)), *[_fail(AWAY)] * 4, _send(4, 10))
    assert run_virtually(_ids(workers, limits=limits)) == OUTPUT


def test_request_that_its_worker_forgets_ends_at_its_deadline_and_is_cancelled() -> None:
    workers = WorkerPool(lambda stream, job: None)
    with pytest.raises(DeadlineExceeded):
        run_virtually(_ids(workers, _job(deadline_s=60.0)))
    assert workers.num_cancelled == 1


async def test_closing_the_stream_cancels_the_job() -> None:
    workers = WorkerPool(_send(0, 4))
    async with aclosing(Relay(workers).stream(_job())) as events:
        async for _ in events:
            break
    assert workers.num_cancelled == 1


async def test_slow_reader_gets_several_steps_as_one() -> None:
    stream = TokenStream(lambda: None)
    for place in range(4):
        _send(place, place + 1)(stream, _job())
    tokens = await stream.next()
    assert tokens.token_ids == OUTPUT[:4]
    assert tokens.position == 0
    assert len(tokens.logprobs) == 4


async def test_stream_says_what_arrived_before_it_fails() -> None:
    stream = TokenStream(lambda: None)
    _send(0, 2)(stream, _job())
    stream.fail(AWAY)
    assert (await stream.next()).token_ids == OUTPUT[:2]
    with pytest.raises(Unavailable):
        await stream.next()


async def test_readers_of_a_late_gateway_are_woken_less_often_and_lose_nothing() -> None:
    pacer = WakeupPacer()
    for _ in range(200):
        pacer.observe(0.02)
    assert pacer.gather_s("acme") > 0.01
    stream = TokenStream(lambda: None, pacer)
    taken: list[Tokens] = []

    async def read() -> None:
        while not taken or taken[-1].finish_reason is None:
            taken.append(await stream.next())

    reading = asyncio.create_task(read())
    for place in range(len(OUTPUT)):
        await asyncio.sleep(0)
        _send(place, place + 1)(stream, _job())
    await reading
    assert [i for tokens in taken for i in tokens.token_ids] == list(OUTPUT)
    assert taken[0].token_ids == OUTPUT[:1]
    assert len(taken) <= 3


def test_gateway_that_keeps_up_gathers_nothing() -> None:
    pacer = WakeupPacer()
    for lag_s in (0.05, *[0.0005] * 300):
        pacer.observe(lag_s)
    assert pacer.gather_s("acme") == 0.0


def test_many_streams_share_half_a_core() -> None:
    pacer = WakeupPacer()
    for _ in range(10):
        pacer.opened("acme")
    assert 0 < pacer.gather_s("acme") < 0.002
    for _ in range(10_000):
        pacer.opened("acme")
    assert pacer.gather_s("acme") <= 0.05


@pytest.mark.hostile
def test_the_streams_of_one_tenant_do_not_delay_the_tokens_of_another() -> None:
    pacer = WakeupPacer()
    for tenant in ("acme", *["globex"] * 500):
        pacer.opened(tenant)
    assert pacer.gather_s("acme") < 0.001
    assert pacer.gather_s("globex") == 0.05
    for _ in range(500):
        pacer.closed("globex")
    assert pacer.gather_s("globex") == 0.0


async def test_first_token_overtakes_the_readers_of_a_large_step() -> None:
    pacer, order = WakeupPacer(), []
    streams = [TokenStream(lambda: None, pacer) for _ in range(100)]

    async def read(number: int, stream: TokenStream) -> None:
        while (await stream.next()).finish_reason is None:
            order.append(number)

    readers = [asyncio.create_task(read(n, s)) for n, s in enumerate(streams)]
    await asyncio.sleep(0)
    for place in range(2):
        for stream in streams[:99]:
            _send(place, place + 1)(stream, _job())
        if not place:
            await eventually(lambda: len(order) == 99)
            order.clear()
    _send(0, 1)(streams[99], _job())
    await eventually(lambda: len(order) == 100)
    assert sorted(order) == list(range(100))
    assert order.index(99) < 20
    for stream in streams:
        _send(9, 10)(stream, _job())
    await asyncio.gather(*readers)
