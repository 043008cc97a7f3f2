"""A plan's rows as arrays on the host, and as the small inputs of a step on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.layers.ropes import Ropes
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.runner.block_tables import BlockTables
from loraplex_services.worker.runner.input_buffer import CHANGES_BYTES, InputBuffer
from loraplex_services.worker.runner.step_inputs import StepInputs, read_plan
from loraplex_services.worker.types.model_config import RopeConfig
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan

CPU = torch.device("cpu")
ADAPTER, OTHER = ((3, 0.5),), ((4, 1.0),)


@pytest.fixture
def ropes() -> Ropes:
    rope = RopeConfig(kind="default", dim=8, theta=1e4)
    made = Ropes([rope], CPU)
    made.reserve(8)
    made.enter(4, [rope])
    return made


def request(num_prompt: int, num_output: int = 0, **fields: object) -> Request:
    params = SamplingParams(max_tokens=99, seed=0)
    made = Request("r", list(range(100, 100 + num_prompt)), params, **fields)
    made.output_ids = list(range(500, 500 + num_output))
    made.block_tables = [list(range(10, 10 + -(-(num_prompt + num_output) // 4)))]
    return made


def mixed_plan() -> StepPlan:
    return StepPlan(
        7,
        (
            PlannedRow(request(6), 2, 4, True, ADAPTER),
            PlannedRow(request(5, adapters_from=3), 0, 5, True, ADAPTER),
            PlannedRow(request(3, 2), 4, 1, True, ADAPTER),
            PlannedRow(request(3, 2), 5, 1, True, ADAPTER, follows=2),
            PlannedRow(request(2, 1), 2, 1, True, OTHER, follows=0),
        ),
    )


def test_a_plan_is_read_into_arrays_by_token_row(ropes: Ropes) -> None:
    step = read_plan(mixed_plan(), ropes)
    assert step.token_ids.tolist() == [102, 103, 104, 105, 100, 101, 102, 103, 104, 501, 0, 0]
    assert step.positions().tolist() == [2, 3, 4, 5, 0, 1, 2, 3, 4, 4, 5, 2]
    assert step.follows.tolist() == [[10, 11], [2, 0]]
    assert step.rope_rows is not None
    assert step.per_token(step.rope_rows).tolist() == [0] * 11 + [10]
    assert not step.is_decode
    read = step.read_rows
    assert read is not None
    assert read.tolist() == [3, 8, 9, 10, 11]


def test_neighbours_with_one_adapter_share_a_run_where_it_acts(ropes: Ropes) -> None:
    runs = read_plan(mixed_plan(), ropes).runs
    assert runs == (RowRun(3, 0.5, 0, 4), RowRun(3, 0.5, 7, 11), RowRun(4, 1.0, 11, 12))


def make_buffer(max_blocks: int = 64) -> InputBuffer:
    return InputBuffer(16, 8, 4, BlockTables(1, 8, max_blocks, 4, CPU))


def addresses(buffer: InputBuffer) -> list[int]:
    inputs = buffer.input_ids, buffer.kv_slots, buffer.decode_rows, buffer.runs
    return [tensor.data_ptr() for tensor in inputs]


def test_a_step_fills_the_buffer_and_pads_what_is_left(ropes: Ropes) -> None:
    buffer, step = make_buffer(), read_plan(mixed_plan(), ropes)
    before = addresses(buffer)
    for _ in range(2):
        buffer.fill(step, step.runs)
        buffer.take_outputs(torch.tensor([71, 72, 73]))
    assert before == addresses(buffer)
    assert buffer.input_ids.tolist() == [*step.token_ids.tolist()[:10], 73, 71, 0, 0, 0, 0]
    assert buffer.positions.tolist() == [*step.positions().tolist(), 0, 0, 0, 0]
    kv_slots = [10 * 4 + position for position in step.positions().tolist()]
    assert buffer.kv_slots[0].tolist() == [*kv_slots, -1, -1, -1, -1]
    assert buffer.decode_rows.tolist() == [*buffer.table_rows[2:], 0, 0, 0, 0, 0]
    words = buffer.runs.numpy()
    assert words[:, :3].tolist() == [[3, 0, 4], [3, 7, 11], [4, 11, 12], [0, 0, 0]]
    assert words[:3, 3].copy().view(np.float32).tolist() == [0.5, 0.5, 1.0]
    buffer.clear()
    assert not buffer.decode_rows.any() and not buffer.runs.any()
    assert buffer.kv_slots.eq(-1).all()


def test_more_changes_than_the_buffer_holds_reach_the_tables(ropes: Ropes) -> None:
    num_blocks = CHANGES_BYTES // 12 + 5
    long = request(4 * num_blocks)
    row = PlannedRow(long, 4 * num_blocks - 1, 1, True, (), follows=1)
    step: StepInputs = read_plan(StepPlan(0, (row,)), ropes)
    buffer = make_buffer(num_blocks)
    buffer.fill(step)
    buffer.take_outputs(torch.tensor([8, 9]))
    table = buffer.block_tables.device[0, buffer.table_rows[0]]
    assert table[:num_blocks].tolist() == long.block_tables[0]
    assert buffer.input_ids[0] == 9
