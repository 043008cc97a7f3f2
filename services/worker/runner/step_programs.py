"""Decode steps and short prompts on CPUs as programs of kernel calls: see `native/program.py`.

There is one program for each number of rows, with adapters and without. Steps are filled up with
rows that nothing reads and sequences without tokens, so that few programs are recorded. Steps that
are not recorded give the same results, more slowly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.routing import RoutingNotes
from loraplex_services.worker.model.decoder import LayersPass
from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.native.isa import AMX
from loraplex_services.worker.native.program import Program, ProgramMemory
from loraplex_services.worker.ops.attention.cpu import GroupSequences, NativeAttentionMetadata
from loraplex_services.worker.ops.lora.cpu_records import RUN_WORDS
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.rope.torch import CosSin

Shape = tuple[int, bool]
"""Rows of a program, and whether it has adapters. It has as many sequences as rows."""

MAX_ROWS = 64
"""Rows of a step up to which Python takes a share of it that is worth saving."""
STEPS_ON_LARGER = 8
"""Steps of a size that run as a larger program before one is recorded. Together, the rows that they
compute in vain cost no more than recording."""
TILE_ROWS, FEW_ROWS = 16, 4
"""Steps with prompts are filled up to a multiple of 16 rows on AMX, which multiplies as many in the
time of one, and of 4 elsewhere."""


class StepPrograms:
    """Computes the layers of a model, by programs where it can."""

    def __init__(
        self,
        native: Native,
        compute: LayersPass,
        max_rows: int,
        *,
        rows_at_once: int,
        is_dense: bool,
    ) -> None:
        """
        Args:
            compute: the layers in Python.
            max_rows: the most rows of a decode step, and of a program.
            rows_at_once: see `NativeOperators`.
            is_dense: whether all rows read the same weights. Rows that nothing reads would read
                other experts' weights, and their routers are given what may not be numbers.
        """
        self._native = native
        self._rows_at_once = rows_at_once
        self._is_dense = is_dense
        self._row_unit = TILE_ROWS if native.isa == AMX else FEW_ROWS
        self._compute = compute
        self._memory = ProgramMemory(min(max_rows, MAX_ROWS))
        self._inputs = _Inputs(self._memory.max_rows)
        self._programs: dict[Shape, tuple[Program, RoutingNotes]] = {}
        """Each with the experts that a run leaves."""
        self._steps: Counter[Shape] = Counter()
        """Steps of each shape that were not recorded."""
        self._uses_torch: set[bool] = set()
        """Whether steps with adapters, and those without, cannot be recorded."""

    def forward(self, x: Tensor, rotations: Sequence[CosSin], batch: ForwardBatch) -> Tensor:
        """See `Decoder.forward_layers`."""
        has_prompts = len(x) > len(batch.attention.seq_lens)
        shape = self._filled(len(x), batch, has_prompts), bool(batch.lora.runs)
        if shape[1] in self._uses_torch or not self._can_record(shape, batch, has_prompts):
            return self._compute(x, rotations, batch)
        if shape not in self._programs:
            self._steps[shape] += 1
            larger = self._larger(shape, batch)
            if larger is None and has_prompts and self._steps[shape] == 1:
                return self._compute(x, rotations, batch)  # many of these shapes come once
            shape = larger or shape
        recorded = self._programs.get(shape)
        self._inputs.write(shape[0], x, rotations, batch)
        if recorded is None:
            return self._record(shape, rotations, batch)[: len(x)]
        program, notes = recorded
        program.run()
        if batch.routing is not None:
            batch.routing.copy(notes)
        return program.result[: len(x)].clone()

    def _filled(self, num_rows: int, batch: ForwardBatch, has_prompts: bool) -> int:
        """Rows of the program for a step. Decode steps are filled up to a power of two, or to the
        middle between two of them, so that few rows are computed in vain."""
        if not self._may_fill(batch) or num_rows > self._memory.max_rows:
            return num_rows
        unit = self._row_unit
        if not has_prompts:
            next_power = 1 << (num_rows - 1).bit_length()
            unit = min(self._rows_at_once, max(1, next_power // 4))
        return min(num_rows + -num_rows % unit, self._memory.max_rows)

    def _may_fill(self, batch: ForwardBatch) -> bool:
        return self._is_dense and batch.states is None

    def _larger(self, shape: Shape, batch: ForwardBatch) -> Shape | None:
        """The smallest program that a step of `shape`, which has none, runs as for now, with up to
        twice as many rows. None = there is none, or it is time to record."""
        if self._rows_at_once == 1 or not self._may_fill(batch):
            return None
        if self._steps[shape] > STEPS_ON_LARGER:
            return None
        rows, has_adapters = shape
        sizes = (own for own, adapters in self._programs if adapters == has_adapters)
        larger = min((own for own in sizes if rows < own <= 2 * rows), default=None)
        return None if larger is None else (larger, has_adapters)

    def _can_record(self, shape: Shape, batch: ForwardBatch, has_prompts: bool) -> bool:
        """Whether programs have all the inputs."""
        metadata, lora = batch.attention, batch.lora
        num_rows, _ = shape
        return (
            num_rows <= self._memory.max_rows
            and isinstance(metadata, NativeAttentionMetadata)
            and metadata.kv_cache_params.use_cache
            and not metadata.is_dummy_attention
            and (not has_prompts or self._may_fill(batch))
            and (batch.states is None or len(batch.states.words) == num_rows)
            and len(lora.runs) <= num_rows
            and lora.adds_only
        )

    def _record(self, shape: Shape, rotations: Sequence[CosSin], batch: ForwardBatch) -> Tensor:
        num_rows, has_adapters = shape
        x, fixed_rotations, fixed_batch = self._inputs.read(num_rows, rotations, batch)
        notes = RoutingNotes()
        fixed_batch = replace(fixed_batch, routing=notes)
        self._memory.begin(num_rows)
        result, program = self._native.record(
            lambda: self._compute(x, fixed_rotations, fixed_batch), self._memory
        )
        if program is None:
            self._uses_torch.add(has_adapters)
        else:
            self._programs[shape] = program, notes
        if batch.routing is not None:
            batch.routing.copy(notes)
        return result.clone()


class _Inputs:
    """What programs read, at addresses that stay: the first rows of tensors."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._ends = torch.arange(1, max_rows + 1)
        self._spans = torch.stack((self._ends - 1, self._ends), dim=1)
        self._runs = torch.zeros(max_rows, RUN_WORDS, dtype=torch.int64)
        self._tensors: list[Tensor] = []
        """Copies of the tensors that `_varying` returns."""

    def write(
        self, num_rows: int, x: Tensor, rotations: Sequence[CosSin], batch: ForwardBatch
    ) -> None:
        """Take over the inputs of a step, as those of one with `num_rows` rows."""
        varying = _varying(num_rows, x, rotations, batch)
        if not self._tensors:
            self._tensors = [new.new_empty(self._max_rows, *new.shape[1:]) for new in varying]
        for ours, new in zip(self._tensors, varying, strict=True):
            ours[: len(new)] = new
        self._write_runs(num_rows, batch.lora)

    def _write_runs(self, num_rows: int, lora: LoraBatch) -> None:
        """The kernels skip runs without rows."""
        if lora.runs:
            runs = lora.packed_runs
            self._runs[: len(runs)] = runs
            self._runs[len(runs) : num_rows] = 0

    def read(
        self, num_rows: int, rotations: Sequence[CosSin], batch: ForwardBatch
    ) -> tuple[Tensor, Sequence[CosSin], ForwardBatch]:
        """The inputs that were written last, as a pass takes them. The batch's metadata is
        mutated."""
        ours = iter([tensor[:num_rows] for tensor in self._tensors])
        x = next(ours)
        of_kind = {id(kind): (next(ours), next(ours)) for kind in _kinds(rotations)}
        metadata, lora, states = batch.attention, batch.lora, batch.states
        assert isinstance(metadata, NativeAttentionMetadata)
        metadata.task_ends = next(ours)
        metadata.groups = tuple(
            GroupSequences(next(ours), group.block_ids) for group in metadata.groups
        )
        if states is not None:
            states = replace(
                states,
                row_ends=self._ends[:num_rows],
                words=self._spans[:num_rows],
                sources=next(ours),
                targets=next(ours),
            )
        if lora.runs:
            lora = replace(lora, runs_at=self._runs[:num_rows])
        fixed = replace(
            batch,
            lora=lora,
            states=states,
            read_rows=None,
            layer_inputs=None if batch.layer_inputs is None else next(ours),
            query_scales=None if batch.query_scales is None else next(ours),
        )
        return x, [of_kind[id(kind)] for kind in rotations], fixed


def _varying(
    num_rows: int, x: Tensor, rotations: Sequence[CosSin], batch: ForwardBatch
) -> list[Tensor]:
    """What differs between steps of equal numbers of rows, besides runs, in the order in which
    `_Inputs.read` takes it."""
    metadata, states = batch.attention, batch.states
    assert isinstance(metadata, NativeAttentionMetadata)
    of_states = () if states is None else (states.sources, states.targets)
    others = (*of_states, batch.layer_inputs, batch.query_scales)
    assert metadata.task_ends is not None
    num_empty = num_rows - len(metadata.task_ends)
    last_end = metadata.task_ends[-1:].expand(num_empty)
    return [
        x,
        *chain.from_iterable(_kinds(rotations)),
        torch.cat((metadata.task_ends, last_end)),
        *(F.pad(group.words, (0, 0, 0, num_empty)) for group in metadata.groups),
        *(tensor for tensor in others if tensor is not None),
    ]


def _kinds(rotations: Sequence[CosSin]) -> list[CosSin]:
    """Each only once, in order."""
    return list({id(rotation): rotation for rotation in rotations}.values())
