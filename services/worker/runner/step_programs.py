"""Steps on CPUs as programs of kernel calls: see `native/program.py`.

A program computes steps of any number of rows, with sequences that have no tokens if there are more
rows than sequences. Steps that have none give the same results, more slowly.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.routing import RoutingNotes
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.native.bindings import Native
from loraplex_services.worker.native.program import Program, ProgramMemory
from loraplex_services.worker.ops.attention.cpu import GroupSequences, NativeAttentionMetadata
from loraplex_services.worker.ops.lora.cpu_records import RUN_WORDS
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.rope.torch import CosSin

MAX_ROWS = 2048
"""Most rows of a program. In larger steps, Python takes too little of the time to be worth the
memory."""


class Kind(NamedTuple):
    """Steps that one program computes."""

    has_adapters: bool
    skips_rows: bool
    """Whether the program ends with the last mixer, because only some rows are read."""


class Recorded(NamedTuple):
    """A program, and where each run of it notes the experts."""

    program: Program
    notes: RoutingNotes


class StepPrograms:
    """Computes the layers of a model, by programs where it can."""

    def __init__(self, native: Native, model: Decoder, max_rows: int) -> None:
        """`max_rows`: the most rows of a step."""
        self._native = native
        self._model = model
        self._memory = ProgramMemory(min(max_rows, MAX_ROWS))
        self._inputs = _Inputs(self._memory.max_rows)
        self._programs: dict[Kind, Recorded | None] = {}
        """None = such steps cannot be recorded."""

    def forward(self, x: Tensor, rotations: Sequence[CosSin], batch: ForwardBatch) -> Tensor:
        """See `Decoder.forward_layers`."""
        kind = Kind(bool(batch.lora.runs), self._model.skips_rows(batch))
        if not self._can_take(len(x), batch) or self._programs.get(kind, kind) is None:
            return self._model.forward_layers(x, rotations, batch)
        self._inputs.write(x, rotations, batch)
        if kind not in self._programs:
            self._programs[kind] = self._record(kind, rotations, batch)
        recorded = self._programs[kind]
        if recorded is None:
            return self._model.forward_layers(x, rotations, batch)
        result = recorded.program.run(len(x))
        if batch.routing is not None:
            batch.routing.copy(recorded.notes, len(x))
        if kind.skips_rows:
            return self._model.end_of_rows(self._inputs.x[: len(x)], result, batch)
        return result.clone()

    def _can_take(self, num_rows: int, batch: ForwardBatch) -> bool:
        """Whether programs have all the inputs."""
        metadata, lora = batch.attention, batch.lora
        return (
            num_rows <= self._memory.max_rows
            and isinstance(metadata, NativeAttentionMetadata)
            and metadata.kv_cache_params.use_cache
            and not metadata.is_dummy_attention
            and len(lora.runs) <= num_rows
            and lora.adds_only
        )

    def _record(
        self, kind: Kind, rotations: Sequence[CosSin], batch: ForwardBatch
    ) -> Recorded | None:
        notes = RoutingNotes()

        def compute(num_rows: int) -> Tensor:
            notes.clear()
            inputs = self._inputs.read(num_rows, rotations, replace(batch, routing=notes))
            if kind.skips_rows:
                return self._model.forward_mixers(*inputs)
            return self._model.forward_layers(*inputs)

        program = self._native.record(compute, self._memory)
        return None if program is None else Recorded(program, notes)


class _Inputs:
    """The inputs of programs, at addresses that stay: the first rows of tensors."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._runs = torch.zeros(max_rows, RUN_WORDS, dtype=torch.int64)
        self._tensors: list[Tensor] = []
        """Copies of the tensors that `_varying` returns."""

    @property
    def x(self) -> Tensor:
        """The residual stream, which programs mutate."""
        return self._tensors[0]

    def write(self, x: Tensor, rotations: Sequence[CosSin], batch: ForwardBatch) -> None:
        """Take over the inputs of a step."""
        varying = _varying(x, rotations, batch)
        if not self._tensors:
            self._tensors = [new.new_empty(self._max_rows, *new.shape[1:]) for new in varying]
        for ours, new in zip(self._tensors, varying, strict=True):
            ours[: len(new)] = new
        self._write_runs(len(x), batch.lora)

    def _write_runs(self, num_rows: int, lora: LoraBatch) -> None:
        """The kernels skip runs without rows."""
        if lora.runs:
            runs = lora.packed_runs
            self._runs[: len(runs)] = runs
            self._runs[len(runs) : num_rows] = 0

    def read(
        self, num_rows: int, rotations: Sequence[CosSin], batch: ForwardBatch
    ) -> tuple[Tensor, Sequence[CosSin], ForwardBatch]:
        """The first rows of the inputs, as a pass takes them. They may be those of a larger step
        than was written, since nothing is computed while a pass is recorded."""
        ours = iter([tensor[:num_rows] for tensor in self._tensors])
        x = next(ours)
        of_kind = {id(kind): (next(ours), next(ours)) for kind in _kinds(rotations)}
        metadata, lora, states = batch.attention, batch.lora, batch.states
        assert isinstance(metadata, NativeAttentionMetadata)
        metadata = copy.copy(metadata)
        metadata.task_ends = next(ours)
        metadata.groups = tuple(
            GroupSequences(next(ours), group.block_ids) for group in metadata.groups
        )
        if states is not None:
            states = replace(
                states,
                row_ends=next(ours),
                words=next(ours),
                sources=next(ours),
                targets=next(ours),
            )
        if lora.runs:
            lora = replace(lora, runs_at=self._runs[:num_rows])
        fixed = replace(
            batch,
            attention=metadata,
            lora=lora,
            states=states,
            read_rows=None,
            layer_inputs=None if batch.layer_inputs is None else next(ours),
            query_scales=None if batch.query_scales is None else next(ours),
            shared_kv={},
        )
        return x, [of_kind[id(kind)] for kind in rotations], fixed


def _varying(x: Tensor, rotations: Sequence[CosSin], batch: ForwardBatch) -> list[Tensor]:
    """The facts that differ between steps of equal numbers of rows, besides runs, in the order in
    which `_Inputs.read` takes it. There are as many sequences, and as many spans of states, as
    rows."""
    metadata, states, num_rows = batch.attention, batch.states, len(x)
    assert isinstance(metadata, NativeAttentionMetadata) and metadata.task_ends is not None
    varying = [x, *chain.from_iterable(_kinds(rotations)), _more_ends(metadata.task_ends, num_rows)]
    varying += [_more_rows(group.words, num_rows) for group in metadata.groups]
    if states is not None:
        spans = states.words, states.sources, states.targets
        varying.append(_more_ends(states.row_ends, num_rows))
        varying += [_more_rows(words, num_rows) for words in spans]
    others = batch.layer_inputs, batch.query_scales
    return varying + [tensor for tensor in others if tensor is not None]


def _more_ends(ends: Tensor, size: int) -> Tensor:
    """Ends of `size` lists, of which the further ones are empty."""
    return torch.cat((ends, ends[-1:].expand(size - len(ends))))


def _more_rows(rows: Tensor, size: int) -> Tensor:
    """`size` rows, of which the further ones are zeros."""
    return F.pad(rows, (0, 0, 0, size - len(rows)))


def _kinds(rotations: Sequence[CosSin]) -> list[CosSin]:
    """Each only once, in order."""
    return list({id(rotation): rotation for rotation in rotations}.values())
