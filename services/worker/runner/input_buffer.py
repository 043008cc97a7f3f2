"""The small inputs of a step on the device, written by one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_services.worker.ops.attention.metadata import DeviceInputs
from loraplex_services.worker.ops.lora.long_runs import TILE_WORDS
from loraplex_services.worker.ops.lora.runs import RowRun, cut_at_tiles
from loraplex_services.worker.runner.block_tables import BlockTables
from loraplex_services.worker.runner.step_inputs import Int64s, StepInputs
from loraplex_services.worker.transfers import to_device
from loraplex_services.worker.types.step_plan import StepPlan

CHANGES_BYTES = 32 << 10
"""Size in bytes of the changes of a step, after the static inputs. A step with more changes copies
twice."""
RUN_WORDS = 4
NO_TILES = np.zeros((1, TILE_WORDS), np.int32)
ALIGNMENT = 16

Number = TypeVar("Number", bound=np.generic)


class InputBuffer:
    """Inputs of at least `num_tokens` token rows, at addresses that stay.

    Token rows beyond a step's are padding that writes nothing: token 0 at position 0, and no KV
    slot.
    """

    def __init__(
        self,
        num_tokens: int,
        num_rows: int,
        num_runs: int,
        tables: BlockTables,
        num_tiles: int = 0,
    ) -> None:
        """
        Args:
            num_rows: the most generations.
            num_runs: the most short runs of rows with one adapter.
            num_tiles: the most tiles of long runs.
        """
        device, num_groups = tables.device.device, len(tables.device)
        num_tokens = _aligned(num_tokens)  # all rows begin where kernels expect any tensor to
        self.block_tables = tables
        shapes = (
            (3 + num_groups, num_tokens),
            (1, num_rows),
            (num_runs, RUN_WORDS),
            (1 + num_tiles, TILE_WORDS),
        )
        self._parts: list[tuple[int, tuple[int, int]]] = []
        self._num_static_bytes = 0
        for shape, itemsize in zip(shapes, (8, 4, 4, 4), strict=True):
            self._parts.append((self._num_static_bytes, shape))
            self._num_static_bytes += _aligned(shape[0] * shape[1] * itemsize)
        self._data = torch.zeros(
            self._num_static_bytes + CHANGES_BYTES, dtype=torch.uint8, device=device
        )
        numbers = self._on_device(0, torch.int64)
        self.input_ids, self.positions, self.rope_rows = numbers[:3]
        """int64 `[num_tokens]` each."""
        self.kv_slots = numbers[3:]
        """int64 `[KV groups, num_tokens]`: see `BlockTables.kv_slots`; -1 = none."""
        self.decode_rows = self._on_device(1, torch.int32)[0]
        """int32 `[num_rows]`: where the block tables of the generations are."""
        self.runs = self._on_device(2, torch.int32)
        """int32 `[num_runs, 4]`: slot, begin, end, float32 bits of the coefficient."""
        self.tiles = self._on_device(3, torch.int32)
        """int32 `[1 + num_tiles, TILE_WORDS]`: `long_runs.tile_words`."""
        self.table_rows: Int64s = np.zeros(0, dtype=np.int64)
        """`[n]`, on the host: where the block tables of the planned rows are."""
        self._follows: Tensor | None = None

    def clear(self) -> None:
        """Fill with padding."""
        nothing: Int64s = np.zeros(0, dtype=np.int64)
        pairs = nothing.reshape(2, 0)
        self.fill(StepInputs(StepPlan(-1, ()), (), nothing, nothing, nothing, None, pairs))

    def fill(
        self,
        step: StepInputs,
        runs: tuple[RowRun, ...] = (),
        tiles: NDArray[np.int32] = NO_TILES,
    ) -> None:
        """Copy a step to the device, and the changes of the block tables with it.

        Args:
            runs: the step's short runs.
            tiles: those of its long runs.
        """
        tables, num_tokens = self.block_tables, step.num_token_rows
        changes = tables.update(step.plan.rows)
        self.table_rows = changes.rows
        positions, token_table_rows = step.positions(), step.per_token(changes.rows)
        changed: list[NDArray[Any]] = [changes.indices, step.follows.ravel(), changes.blocks]
        extra = [array.view(np.uint8) for array in changed]
        num_extra_bytes = sum(map(len, extra))
        staging = torch.empty(
            self._num_static_bytes + num_extra_bytes,
            dtype=torch.uint8,
            pin_memory=self._data.is_cuda,
        )
        host = staging.numpy()
        numbers = self._on_host(host, 0, np.int64)
        numbers[:3, num_tokens:] = 0
        numbers[3:, num_tokens:] = -1
        numbers[0, :num_tokens] = step.token_ids
        numbers[1, :num_tokens] = positions
        numbers[2, :num_tokens] = 0 if step.rope_rows is None else step.per_token(step.rope_rows)
        for group in range(len(numbers) - 3):
            kv_slots = tables.kv_slots(group, token_table_rows, positions)
            numbers[3 + group, :num_tokens] = kv_slots
        decode_rows = self._on_host(host, 1, np.int32)[0]
        num_contexts = step.plan.num_contexts
        decode_rows[: step.num_rows - num_contexts] = changes.rows[num_contexts:]
        decode_rows[step.num_rows - num_contexts :] = 0
        self._fill_runs(self._on_host(host, 2, np.int32), cut_at_tiles(runs))
        self._on_host(host, 3, np.int32)[: len(tiles)] = tiles
        begin = self._num_static_bytes
        for array in extra:
            host[begin : begin + len(array)] = array
            begin += len(array)
        self._apply(self._upload(staging), len(changes.indices), step.follows.shape[1])

    def take_outputs(self, outputs: Tensor) -> None:
        """Insert the tokens that the previous step chose and that only the device knows.

        Args:
            outputs: int64, of the step before.
        """
        if self._follows is not None:
            token_rows, sources = self._follows
            self.input_ids.index_copy_(0, token_rows, outputs.index_select(0, sources))

    def device_inputs(self, step: StepInputs) -> DeviceInputs:
        """The inputs that an eager step's attention reads here."""
        num_tokens, num_generations = step.num_token_rows, step.num_rows - step.plan.num_contexts
        return DeviceInputs(
            tables=tuple(self.block_tables.device),
            table_rows=self.table_rows.tolist(),
            kv_slots=tuple(kv_slots[:num_tokens] for kv_slots in self.kv_slots),
            decode_rows=self.decode_rows[:num_generations],
        )

    def _upload(self, staging: Tensor) -> Tensor:
        """Copy to the device. Returns the part there that follows the static inputs."""
        if len(staging) <= len(self._data):
            self._data[: len(staging)].copy_(staging, non_blocking=True)
            return self._data[self._num_static_bytes : len(staging)]
        static = staging[: self._num_static_bytes]
        self._data[: self._num_static_bytes].copy_(static, non_blocking=True)
        return to_device(staging[self._num_static_bytes :], self._data.device)

    def _apply(self, changed: Tensor, num_entries: int, num_follows: int) -> None:
        """Write changes of the block tables; keep which tokens follow which outputs."""
        num_words = num_entries + 2 * num_follows
        words = changed[: 8 * num_words].view(torch.int64)
        if num_entries:
            blocks = changed[8 * num_words :].view(torch.int32)
            self.block_tables.device.view(-1).index_copy_(0, words[:num_entries], blocks)
        self._follows = words[num_entries:].view(2, num_follows) if num_follows else None

    def _fill_runs(self, words: NDArray[np.int32], runs: Sequence[RowRun]) -> None:
        words[len(runs) :] = 0
        if runs:
            slots, coefs, begins, ends = zip(*runs, strict=True)
            words[: len(runs), :3] = np.array((slots, begins, ends)).T
            words[: len(runs), 3] = np.array(coefs, dtype=np.float32).view(np.int32)

    def _on_device(self, part: int, dtype: torch.dtype) -> Tensor:
        begin, shape = self._parts[part]
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        return self._data[begin : begin + num_bytes].view(dtype).view(shape)

    def _on_host(self, host: NDArray[np.uint8], part: int, dtype: type[Number]) -> NDArray[Number]:
        begin, shape = self._parts[part]
        num_bytes = shape[0] * shape[1] * np.dtype(dtype).itemsize
        return host[begin : begin + num_bytes].view(dtype).reshape(shape)


def _aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
