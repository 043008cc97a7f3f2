"""The runner: one base on one device. Builds the batch, calls the model, samples.

It decides nothing: plans come from the scheduler, blocks and slots from their owners.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from loraplex.adapter_format.geometry import Geometry
from loraplex.errors import InvalidRequest, LoraplexError
from services.worker.adapters.base_values import TORCH_DTYPES, SiteValues
from services.worker.adapters.contents import ModuleReader, base_geometry, weights_key
from services.worker.adapters.layout import AdapterLayout
from services.worker.adapters.loader import AdapterLoader, CopiedImage
from services.worker.adapters.packing import Packer
from services.worker.adapters.weights import AdapterWeights
from services.worker.kernels.launch import INTERPRETING
from services.worker.kernels.lora.records import Records
from services.worker.kernels.lora.worklist import LoraBatch
from services.worker.layers.native_operators import NativeOperators
from services.worker.layers.operators import Operators, TorchOperators
from services.worker.memory.buffer import ArenaBuffer, KvBuffer, blocks_for
from services.worker.memory.kv_layout import TOKENS_PER_BLOCK, plan_kv_groups
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.families import read_model_config
from services.worker.model.load import Checkpoint, DummyWeights, Weights, published
from services.worker.model.own_rope import base_ropes
from services.worker.native.bindings import ACTIVATION_DTYPES, load_native
from services.worker.numerics import (
    dtype_name,
    fingerprint,
    half_wins,
    resolve_device,
    resolve_dtype,
    set_threads,
)
from services.worker.request import Logprobs, PlannedRow, SampledRow, StepPlan
from services.worker.runner_protocol import Copied, ModelInfo
from services.worker.sampling.sampler import LogitsOf, sample, score_tokens
from services.worker.step_batch import BatchMaker, runs_of

if TYPE_CHECKING:  # Triton is not everywhere
    from services.worker.gpu_path import GpuPath


class TorchRunner:
    """Implements `runner_protocol.Runner`."""

    tokens_per_block = TOKENS_PER_BLOCK

    def __init__(
        self,
        model: Decoder,
        arena: ArenaBuffer,
        kv: KvBuffer,
        adapters: AdapterLoader,
        layout: AdapterLayout,
        info: ModelInfo,
        batches: BatchMaker,
    ) -> None:
        self.layout = layout
        self.arena = arena
        self.arena_blocks = arena.num_blocks
        self.block_bytes = arena.block_bytes
        self.num_kv_groups = len(kv.windows)
        self.kv_group_windows = kv.windows
        self._model = model
        self._adapters = adapters
        self._info = info
        self._batches = batches

    def model_info(self) -> ModelInfo:
        """Facts about the base."""
        return self._info

    def pack_adapter(self, path: Path) -> Future[int]:
        """Make the image of the adapter in a verified folder; the result is its blocks."""
        return self._adapters.pack(path)

    def copy_adapter(self, path: Path, blocks: Sequence[int]) -> Future[CopiedImage]:
        """Fill `blocks` from the image in a folder."""
        return self._adapters.copy(path, blocks)

    def await_copies(self, timeout_s: float) -> None:
        """Return when no copy is under way, or after `timeout_s`."""
        self._adapters.await_copies(timeout_s)

    @torch.inference_mode()
    def enter_adapter(self, slot: int, copied: Copied) -> None:
        """Let steps use what was copied under `slot`, which is not in use."""
        self._adapters.enter(slot, cast(CopiedImage, copied))
        self._entered(slot)

    def adapter_blocks(self, path: Path) -> int:
        """Blocks that the adapter in a verified folder needs, for `load_adapter`."""
        return self._adapters.num_blocks(path)

    @torch.inference_mode()
    def load_adapter(self, slot: int, path: Path, blocks: Sequence[int]) -> None:
        """Pack, copy and enter at once, without an image on disk: for tools and tests."""
        self._adapters.load(slot, path, blocks)
        self._entered(slot)

    def _entered(self, slot: int) -> None:
        if self._batches.records is not None:
            self._batches.records.address(slot)
        if self._batches.gpu is not None:
            self._enter_on_gpu(slot, self._batches.gpu)

    def _enter_on_gpu(self, slot: int, gpu: GpuPath) -> None:
        try:
            gpu.enter(slot)
        except LoraplexError:
            self._adapters.weights.unload(slot)
            raise

    def unload_adapter(self, slot: int) -> None:
        """Take `slot` out of the tables."""
        self._adapters.weights.unload(slot)
        if self._batches.records is not None:
            self._batches.records.forget(slot)
        if self._batches.gpu is not None:
            self._batches.gpu.remove(slot)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[SampledRow]:
        """One forward pass and sampling.

        A row's `prompt_logprobs` hold one entry for each computed position p whose successor
        p + 1 is a prompt token, and score that successor; over all chunks of a prompt of n tokens
        they are n - 1 entries. The first prompt token has none.
        """
        if not plan.rows:
            return []
        hidden, lora = self._forward(plan)
        logits_of = self._logits_of(hidden, lora)
        prompt_logprobs = _score_prompts(plan.rows, logits_of)
        wanted = [
            (row.request, end - 1)
            for row, (_, end) in zip(plan.rows, _token_spans(plan.rows), strict=True)
            if row.needs_logits and not row.request.pools
        ]
        token_rows = torch.tensor([row for _, row in wanted], dtype=torch.int64)
        requests = [request for request, _ in wanted]
        eos_ids = self._info.eos_token_ids
        sampled = iter(sample(token_rows, requests, logits_of, eos_ids))
        out = []
        pooled = _pool(plan.rows, hidden)
        for row, scores in zip(plan.rows, prompt_logprobs, strict=True):
            request_id = row.request.request_id
            choice = next(sampled) if row.needs_logits and not row.request.pools else None
            token_id, logprobs = (choice.token_id, choice.logprobs) if choice else (None, None)
            out.append(
                SampledRow(request_id, token_id, logprobs, scores, pooled.get(request_id, ()))
            )
        return out

    def _forward(self, plan: StepPlan) -> tuple[Tensor, LoraBatch]:
        """Hidden states `[T, H]` and the adapters of their rows; by a graph where one fits."""
        gpu = self._batches.gpu
        if gpu is not None:
            runs = runs_of(plan)
            hidden = gpu.forward(plan, runs)
            if hidden is not None:
                return hidden, gpu.lora_batch(runs)
        batch = self._batches.make(plan)
        return self._model.forward(batch), batch.lora

    def _logits_of(self, hidden: Tensor, lora: LoraBatch) -> LogitsOf:
        def logits_of(token_rows: Tensor) -> Tensor:
            chosen = lora.select(token_rows.tolist())
            return self._model.logits(hidden[token_rows.to(hidden.device)], chosen)

        return logits_of


def _token_spans(rows: Sequence[PlannedRow]) -> list[tuple[int, int]]:
    """Token rows [begin, end) of each planned row."""
    spans, begin = [], 0
    for row in rows:
        spans.append((begin, begin + row.num_tokens))
        begin += row.num_tokens
    return spans


def _pool(rows: Sequence[PlannedRow], hidden: Tensor) -> dict[str, tuple[float, ...]]:
    """By request id, the last row of `hidden` `[T, H]` of each whole prompt that pools."""
    spans = zip(rows, _token_spans(rows), strict=True)
    ends = {
        row.request.request_id: end - 1
        for row, (_, end) in spans
        if row.needs_logits and row.request.pools
    }
    if not ends:
        return {}
    vectors = hidden[list(ends.values())].float().tolist()
    return {key: tuple(vector) for key, vector in zip(ends, vectors, strict=True)}


def _score_prompts(rows: Sequence[PlannedRow], logits_of: LogitsOf) -> list[tuple[Logprobs, ...]]:
    out: list[tuple[Logprobs, ...]] = []
    for row, (begin, _) in zip(rows, _token_spans(rows), strict=True):
        num_top, prompt = row.request.sampling.prompt_logprobs, row.request.prompt_ids
        next_ids = prompt[row.start + 1 : row.start + 1 + row.num_tokens]
        if num_top is None or not next_ids:
            out.append(())
            continue
        token_rows = torch.arange(begin, begin + len(next_ids))
        out.append(tuple(score_tokens(token_rows, next_ids, num_top, logits_of)))
    return out


def build_runner(
    model_dir: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    arena_bytes: int,
    max_lora_rank: int = 256,
    max_resident: int = 4096,
    max_num_tokens: int = 2048,
    load_format: str = "auto",
    cpu_isa: str = "auto",
    executors: tuple[Executor, Executor] | None = None,
) -> TorchRunner:
    """Load a base and allocate its arena.

    Args:
        model_dir: folder in Hugging Face layout.
        arena_bytes: for KV cache and adapters together.
        max_lora_rank: adapters of a higher rank are refused at load.
        max_resident: adapters that may be loaded at once; slots are below it.
        max_num_tokens: the most positions of one step.
        load_format: `auto` = safetensors; `dummy` = random weights of the config's shape.
        cpu_isa: instruction set of the CPU kernels (see `native/isa.py`); `torch` = none.
        executors: of copies and of packing (see `AdapterLoader`).

    Raises:
        LoraplexError: naming the file, field or setting that is wrong.
    """
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device, _half_wins(model_dir, load_format, cpu_isa))
    family, config = read_model_config(model_dir)
    weights = _weights(load_format, model_dir, torch_dtype, torch_device)
    operators = _operators(torch_device, torch_dtype, cpu_isa)
    model = family.build(config, weights, operators)
    if torch_device.type == "cpu":
        _share_threads(model.weight_bytes, operators)
    groups = plan_kv_groups(
        config.windows, config.num_kv_heads, config.head_dim, torch_dtype.itemsize
    )
    num_blocks = blocks_for(arena_bytes, groups.block_bytes)
    arena = ArenaBuffer(num_blocks, groups.block_bytes, torch_device)
    sites = model.site_weights
    geometry = base_geometry(model_dir, config, sites.table)
    is_native = isinstance(operators, NativeOperators)
    facts = _dtype_key(torch_dtype), is_native, max_lora_rank, weights_key(model_dir, geometry)
    layout = AdapterLayout(groups.block_bytes, *facts, sites.table, base_ropes(config))
    adapters = AdapterWeights(arena, max_resident, model.ropes, layout.ropes)
    values = SiteValues(sites, layout, torch_device)
    packer = Packer(ModuleReader(geometry, sites.table, max_lora_rank), layout, values)
    loader = AdapterLoader(adapters, packer, executors)
    info = _model_info(config, geometry, torch_device, torch_dtype, operators.name)
    kv = KvBuffer(arena, groups, torch_dtype)
    records = Records(adapters.table, len(sites.table.sites)) if is_native else None
    gpu = _gpu_path(model, operators, kv, adapters, (max_resident, max_lora_rank, max_num_tokens))
    make_metadata = operators.make_metadata
    batches = BatchMaker(
        kv, model.ropes, adapters.table, torch_device, max_num_tokens, make_metadata, records, gpu
    )
    gc.freeze()  # what stays need not be walked by full collections: 4% of a step's time
    return TorchRunner(model, arena, kv, loader, layout, info, batches)


def _half_wins(folder: Path, load_format: str, cpu_isa: str) -> bool:
    """See `numerics.half_wins`; a folder without readable weights is refused later, by name."""
    try:
        return load_format == "auto" and half_wins(*published(folder), cpu_isa)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, LoraplexError):
        return False


def _dtype_key(dtype: torch.dtype) -> str:
    """Its safetensors name."""
    return next(name for name, known in TORCH_DTYPES.items() if known is dtype)


def _gpu_path(
    model: Decoder,
    operators: Operators,
    kv: KvBuffer,
    adapters: AdapterWeights,
    limits: tuple[int, int, int],
) -> GpuPath | None:
    """Tables, workspace and captured graphs where Triton computes, else None.

    `limits` = max_resident, max_lora_rank, max_num_tokens.
    """
    if operators.name != "triton":
        return None
    from services.worker.gpu_path import GpuLimits, GpuPath

    return GpuPath(model, operators, kv, adapters.table, GpuLimits(*limits))


def _operators(device: torch.device, dtype: torch.dtype, cpu_isa: str) -> Operators:
    """Triton on a GPU (or under its interpreter), C++ on a CPU that has kernels for the dtype,
    else torch."""
    if device.type == "cuda" or (INTERPRETING and cpu_isa == "auto"):
        from services.worker.layers.triton_operators import TritonOperators

        return TritonOperators()
    native = None
    if device.type == "cpu" and dtype in ACTIVATION_DTYPES:
        native = load_native(cpu_isa)
    return TorchOperators() if native is None else NativeOperators(native, dtype)


def _share_threads(weight_bytes: int, operators: Operators) -> None:
    """Threads for torch and for the kernels; torch keeps one where it does small things only."""
    set_threads(weight_bytes)
    if isinstance(operators, NativeOperators):
        operators.native.set_threads(torch.get_num_threads())
        torch.set_num_threads(1)


def _weights(load_format: str, folder: Path, dtype: torch.dtype, device: torch.device) -> Weights:
    if load_format == "dummy":
        return DummyWeights(dtype, device)
    if load_format != "auto":
        raise InvalidRequest.field("load_format", load_format, "must be auto or dummy")
    return Checkpoint(folder, dtype, device)


def _model_info(
    config: ModelConfig,
    geometry: Geometry,
    device: torch.device,
    dtype: torch.dtype,
    operators: str,
) -> ModelInfo:
    return ModelInfo(
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        dtype=dtype_name(dtype),
        device=device.type,
        numerics_fingerprint=fingerprint(geometry.fingerprint, device, dtype, operators),
        geometry=geometry,
        rope_switch_len=config.rope_switch_len,
    )
