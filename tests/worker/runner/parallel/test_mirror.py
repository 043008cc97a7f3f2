"""What other ranks read of a step equals what rank 0 has planned."""

import random

import msgspec
import numpy as np

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.runner.parallel import mirror
from loraplex_services.worker.runner.parallel.messages import Step
from loraplex_services.worker.runner.parallel.mirror import StepReader, StepWriter
from loraplex_services.worker.runner.step_inputs import StepInputs
from loraplex_services.worker.types.request import RELEASED_BLOCK, Request
from loraplex_services.worker.types.step_plan import PlannedRow, StateSpan, StepPlan


def make_request(name: str, num_prompt: int, num_groups: int = 2) -> Request:
    tables: list[list[int]] = [[] for _ in range(num_groups)]
    return Request(
        name, [1] * num_prompt, SamplingParams(max_tokens=8, seed=1), block_tables=tables
    )


def make_step(rows: list[tuple[Request, int, int]], **changes: object) -> StepInputs:
    planned = tuple(PlannedRow(r, start, n, False, ()) for r, start, n in rows)
    fields: dict[str, object] = {
        "plan": StepPlan(7, planned),
        "runs": (RowRun(3, 0.5, 0, 2),),
        "token_ids": np.arange(sum(n for _, _, n in rows), dtype=np.int64),
        "starts": np.array([start for _, start, _ in rows], dtype=np.int64),
        "num_tokens": np.array([n for _, _, n in rows], dtype=np.int64),
        "rope_rows": None,
        "follows": np.zeros((2, 0), dtype=np.int64),
    }
    return StepInputs(**{**fields, **changes})


class Pair:
    """Both ends, with the wire between them."""

    def __init__(self) -> None:
        self.writer, self.reader = StepWriter(), StepReader()
        self.num_bytes = 0

    def send(self, step: StepInputs) -> StepInputs:
        data = msgspec.msgpack.encode(self.writer.write(step))
        self.num_bytes = len(data)
        read = self.reader.read(msgspec.msgpack.decode(data, type=Step))
        assert read.runs == step.runs
        for name in ("token_ids", "starts", "num_tokens", "follows"):
            assert np.array_equal(getattr(read, name), getattr(step, name)), name
        assert read.plan.states == step.plan.states
        assert read.plan.num_contexts == step.plan.num_contexts
        assert read.plan.num_context_tokens == step.plan.num_context_tokens
        for theirs, ours in zip(read.plan.rows, step.plan.rows, strict=True):
            assert theirs.request.block_tables == ours.request.block_tables
            assert len(theirs.request.prompt_ids) == len(ours.request.prompt_ids)
        return read


def test_tables_that_grow_shrink_behind_a_window_and_begin_again_arrive():
    rng, pair = random.Random(0), Pair()
    requests = [make_request(str(i), 5 + i) for i in range(6)]
    for step in range(300):
        active = rng.sample(requests, rng.randrange(1, 6))
        for request in active:
            for table in request.block_tables:
                action = rng.randrange(4)
                if action == 0:
                    table.append(rng.randrange(1000))
                elif action == 1 and table:
                    table[rng.randrange(len(table))] = RELEASED_BLOCK
                elif action == 2 and table:
                    table[-1] = rng.randrange(1000)
            if rng.random() < 0.05:
                request.block_tables = [[rng.randrange(1000)] for _ in request.block_tables]
        pair.send(make_step([(request, step, 1) for request in active]))


def test_a_request_that_begins_again_has_other_tables_on_the_other_ranks_too():
    pair, request = Pair(), make_request("a", 4)
    request.block_tables = [[1, 2], [3]]
    first = pair.send(make_step([(request, 0, 4)])).plan.rows[0].request
    tables = first.block_tables
    request.block_tables = [[1, 2], [3]]
    again = pair.send(make_step([(request, 0, 4)])).plan.rows[0].request
    assert again.block_tables is not tables


def test_a_decode_step_is_as_small_after_a_long_context():
    pair, short, long = Pair(), make_request("a", 1), make_request("b", 60_000)
    sizes = []
    for request, num_blocks in ((short, 1), (long, 4000)):
        request.block_tables = [list(range(num_blocks))] * 2
        start = len(request.prompt_ids)
        pair.send(make_step([(request, start, 1)]))
        pair.send(make_step([(request, start + 1, 1)]))
        sizes.append(pair.num_bytes)
    assert sizes[1] <= sizes[0] + 16


def test_ropes_and_tokens_that_follow_a_step_arrive():
    pair, request = Pair(), make_request("a", 4)
    follows = np.array([[0, 1], [5, 2]], dtype=np.int64)
    rope_rows = np.array([3], dtype=np.int64)
    read = pair.send(make_step([(request, 4, 2)], follows=follows, rope_rows=rope_rows))
    assert read.rope_rows is not None and read.rope_rows.tolist() == [3]


def test_the_rows_that_are_read_arrive_although_what_requests_ask_for_does_not():
    pair, request = Pair(), make_request("a", 4)
    read_rows = np.array([1, 3], dtype=np.int64)
    read = pair.send(make_step([(request, 0, 4)], read_rows=read_rows)).read_rows
    assert read is not None and read.tolist() == [1, 3]
    assert pair.send(make_step([(request, 0, 4)])).read_rows is None


def test_states_arrive_and_one_that_stays_where_it_is_is_known_to_stay():
    pair, decoding, starting = Pair(), make_request("a", 4), make_request("b", 48)
    blocks = [7, 9]
    states = (
        (StateSpan(1, blocks, blocks),),
        (StateSpan(32, [], [3, 4]), StateSpan(16, [3, 4], [5, 6])),
    )
    planned = tuple(
        PlannedRow(request, start, num_tokens, False, ())
        for request, start, num_tokens in ((decoding, 4, 1), (starting, 0, 48))
    )
    step = make_step([(decoding, 4, 1), (starting, 0, 48)], plan=StepPlan(7, planned, states))
    [[stays], [fresh, moves]] = pair.send(step).plan.states
    assert stays.source is stays.target
    assert (list(fresh.source), list(moves.source)) == ([], [3, 4])


def test_requests_that_left_are_forgotten_on_both_ends(monkeypatch):
    monkeypatch.setattr(mirror, "MAX_ABSENT", 8)
    pair = Pair()
    for i in range(100):
        pair.send(make_step([(make_request(str(i), 3), 0, 3)]))
    assert len(pair.reader._requests) <= 9
    assert len(pair.writer._known) <= 9


def test_other_ranks_compute_without_the_cache_what_rank_0_does() -> None:
    pair = Pair()
    assert not pair.send(make_step([(make_request("v", 5, num_groups=0), 0, 5)])).plan.uses_cache
    request = make_request("text", 5)
    request.block_tables = [[3], [4]]
    assert pair.send(make_step([(request, 0, 5)])).plan.uses_cache
