"""Block tables on the device against those of the requests, as the scheduler changes them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.runner.block_tables import BlockTables
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.worker.scheduling.stage import Stage, make_request

TOKENS_PER_BLOCK = 4
MAX_ROWS = 6


def write(tables: BlockTables, rows: list[PlannedRow]) -> tuple[np.ndarray, int]:
    """Table rows of a step, and how many entries were written for it."""
    changes = tables.update(rows)
    flat = tables.device.view(-1)
    flat[torch.from_numpy(changes.indices)] = torch.from_numpy(changes.blocks)
    return changes.rows, len(changes.indices)


class CheckedStage(Stage):
    """A stage that keeps tables, and compares what each step reads with its requests."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        shape = len(self.layout.windows), MAX_ROWS, 64
        self.tables = BlockTables(*shape, TOKENS_PER_BLOCK, torch.device("cpu"))
        self.num_written = 0

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        if not plan.rows:
            return
        table_rows, num_written = write(self.tables, plan.rows)
        self.num_written += num_written
        assert len(set(table_rows.tolist())) == len(plan.rows)
        for row, table_row in zip(plan.rows, table_rows, strict=True):
            last = (row.start + row.num_tokens - 1) // TOKENS_PER_BLOCK
            positions = np.array([row.start + row.num_tokens - 1])
            for group, window in enumerate(self.layout.windows):
                first = self.layout.first_live_block(window, row.start)
                expected = row.request.block_tables[group][first : last + 1]
                found = self.tables.device[group, table_row, first : last + 1]
                assert found.tolist() == expected
                kv_slot = self.tables.kv_slots(group, np.array([table_row]), positions)
                slot = int(positions[0]) % TOKENS_PER_BLOCK
                assert kv_slot.tolist() == [expected[-1] * TOKENS_PER_BLOCK + slot]


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=["full", "windowed"])
def test_a_step_finds_the_blocks_of_its_requests_whatever_came_before(
    overlaps: bool, windows: tuple[int | None, ...]
) -> None:
    """Prompts are equal, so that requests complete blocks that another has completed before, and
    some requests are preempted or cancelled."""
    rng = random.Random(3)
    stage = CheckedStage(num_blocks=30, windows=windows, overlaps=overlaps)
    for number in range(60):
        num_prompt, max_tokens = rng.choice([3, 9, 21]), rng.randrange(1, 18)
        stage.submit(make_request(f"r{number}", num_prompt, max_tokens))
        for _ in range(rng.randrange(1, 4)):
            stage.step()
        running = list(stage.scheduler._running)
        if running and rng.random() < 0.2:
            stage.scheduler.remove(running[0].request_id, stage.now)
        elif running and rng.random() < 0.3 and not stage.in_flight:
            stage.scheduler._preempt(running[-1], stage.now)
    stage.run_dry()
    assert len(stage.finished) > 30


def decoding(name: str, num_tokens: int) -> Request:
    request = Request(name, [1] * num_tokens, SamplingParams(max_tokens=9, seed=0))
    request.block_tables = [list(range(-(-num_tokens // TOKENS_PER_BLOCK)))]
    return request


def row_of(request: Request, start: int) -> PlannedRow:
    return PlannedRow(request, start, 1, True, ())


def test_a_long_context_costs_no_entry_while_its_last_block_fills() -> None:
    tables = BlockTables(1, 4, 64, TOKENS_PER_BLOCK, torch.device("cpu"))
    request = decoding("long", 200)
    row, num_written = write(tables, [row_of(request, 196)])
    assert num_written == 50
    for start in (197, 198, 199):
        assert write(tables, [row_of(request, start)]) == (row, 0)
    request.block_tables[0].append(7)
    assert write(tables, [row_of(request, 200)])[1] == 2  # the block just completed, and the next
    assert tables.device[0, row[0], 49:51].tolist() == [49, 7]


def test_requests_keep_their_rows_when_the_batch_shifts() -> None:
    tables = BlockTables(1, 4, 64, TOKENS_PER_BLOCK, torch.device("cpu"))
    requests = [decoding(name, 8) for name in "abcd"]
    rows, _ = write(tables, [row_of(request, 7) for request in requests])
    kept, num_written = write(tables, [row_of(request, 7) for request in requests[1:]])
    assert kept.tolist() == rows[1:].tolist()
    assert num_written == 0
    fresh = decoding("e", 8)
    rows_with_fresh, _ = write(tables, [row_of(r, 7) for r in (fresh, *requests[1:])])
    assert rows_with_fresh.tolist() == rows.tolist(), "the row of who left is given again"


def test_a_request_that_starts_again_in_the_same_place_has_all_its_entries_written() -> None:
    tables = BlockTables(1, 4, 64, TOKENS_PER_BLOCK, torch.device("cpu"))
    requests = [decoding(name, 8) for name in "ab"]
    write(tables, [row_of(request, 8) for request in requests])
    requests[1].block_tables = [[5, 6]]
    rows, num_written = write(tables, [row_of(request, 8) for request in requests])
    assert num_written == 2
    assert tables.device[0, rows[1], :2].tolist() == [5, 6]


@pytest.mark.parametrize(("max_rows", "max_blocks"), [(257, 513), (6, 1), (256, 64)])
def test_the_tables_of_all_groups_begin_at_multiples_of_sixteen_bytes(max_rows, max_blocks):
    tables = BlockTables(3, max_rows, max_blocks, TOKENS_PER_BLOCK, torch.device("cpu")).device
    assert tables.shape[1] == max_rows and tables.shape[2] >= max_blocks
    assert [(table.data_ptr() - tables.data_ptr()) % 16 for table in tables] == [0, 0, 0]
