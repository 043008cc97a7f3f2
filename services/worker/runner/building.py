"""Builds a runner from the folder of a base: model, arena and operators."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loraplex.adapter_format.geometry import Geometry, quantisation_of
from loraplex.cli.progress import ProgressBar
from loraplex.client.progress import Progress
from loraplex.errors import InvalidRequest, LoraplexError, Unsupported
from loraplex_services.worker.adapters.device.base_values import SiteValues
from loraplex_services.worker.adapters.device.loader import AdapterLoader
from loraplex_services.worker.adapters.device.pinned_cache import PinnedCache
from loraplex_services.worker.adapters.device.table import AdapterTable
from loraplex_services.worker.adapters.pack.contents import base_geometry, weights_key
from loraplex_services.worker.adapters.pack.packing import Packer
from loraplex_services.worker.arena_buffer import ArenaBuffer, KvBuffer
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.layers.ranks import OneRank, Ranks
from loraplex_services.worker.model.config_reader import read_json_object
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.model.draft_head import build_draft_head
from loraplex_services.worker.model.dummy_weights import DummyWeights
from loraplex_services.worker.model.families import has_family, read_model_config
from loraplex_services.worker.model.library import build_library_model
from loraplex_services.worker.model.library_decoder import LibraryDecoder
from loraplex_services.worker.model.load import Checkpoint, Weights, published
from loraplex_services.worker.model.on_load import (
    NONE,
    QuantisedOnLoad,
    check_library,
    check_on_load,
)
from loraplex_services.worker.model.quantised import QuantisedCheckpoint
from loraplex_services.worker.ops.attention.backend import AUTO, AttentionMaker
from loraplex_services.worker.ops.lora.cpu_records import Records
from loraplex_services.worker.runner.adapter_division import division_of, log_division
from loraplex_services.worker.runner.allocation import allocate, dtype_key, stored_dtype
from loraplex_services.worker.runner.backends import choose_operators, share_threads
from loraplex_services.worker.runner.memory import (
    ArenaSize,
    default_host_cache_bytes,
    memory_of,
)
from loraplex_services.worker.runner.numerics import (
    FLOAT_DTYPES,
    dtype_name,
    fingerprint,
    prefers_half,
    resolve_device,
    resolve_dtype,
)
from loraplex_services.worker.runner.parallel.collectives import Meeting
from loraplex_services.worker.runner.parallel.followers import Followers
from loraplex_services.worker.runner.parallel.group import (
    LOCAL_TIMEOUT_S,
    NODES_TIMEOUT_S,
    BuildPart,
    check_group,
    join_and_build,
    lead,
)
from loraplex_services.worker.runner.parallel.messages import RankReady
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.step_batch import BatchMaker
from loraplex_services.worker.runner.step_programs import StepPrograms
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.model_config import ModelConfig
from loraplex_services.worker.types.nodes import ONE_NODE, Nodes
from loraplex_services.worker.types.own_rope import base_ropes
from loraplex_services.worker.types.runner_protocol import ModelInfo
from loraplex_services.worker.types.runner_settings import RunnerSettings
from loraplex_services.worker.types.sharding import Shard

logger = logging.getLogger(__name__)


def build_runner(
    model_dir: Path,
    *,
    executors: tuple[Executor, Executor] | None = None,
    num_ranks: int = 1,
    nodes: Nodes = ONE_NODE,
    on_rank_end: Callable[[int, int], None] = lambda rank, code: None,
    **fields: Any,
) -> TorchRunner:
    """Load a base from a folder in Hugging Face layout and allocate its arena.

    Args:
        executors: see `AdapterLoader`.
        num_ranks: processes that share the base. Those of this machine are started here; `close`
            ends them.
        nodes: the machines of these ranks.
        on_rank_end: called from another thread when a rank ends, with its number and exit code.
        fields: those of `RunnerSettings`.

    Raises:
        LoraplexError: naming the file, field or setting that is wrong.
        RankLost: a rank ended or came too late.
    """
    settings = RunnerSettings(**fields)
    build: BuildPart = partial(_build, model_dir, settings, executors)
    if num_ranks == 1:
        return build(OneRank())
    device, num_local = resolve_device(settings.device), nodes.num_local(num_ranks)
    check_group(model_dir, settings.model_impl, device, num_ranks, num_local)
    timeout_s = LOCAL_TIMEOUT_S if nodes.count == 1 else NODES_TIMEOUT_S
    followers = Followers(num_ranks, nodes, model_dir, on_rank_end)
    return lead(followers, build, device, fields, model_dir, timeout_s)


def build_rank(
    model_dir: Path, shard: Shard, meeting: Meeting, fields: Mapping[str, Any]
) -> tuple[TorchRunner, RankReady]:
    """A rank that is not the first. `fields` are those of `build_runner`. Raises as it does."""
    settings = RunnerSettings(**fields)
    device = resolve_device(settings.device)
    check_group(model_dir, settings.model_impl, device, shard.size, meeting.num_local)
    build = partial(_build, model_dir, settings, None)
    return join_and_build(build, device, shard, meeting, model_dir)


def _build(
    model_dir: Path,
    settings: RunnerSettings,
    executors: tuple[Executor, Executor] | None,
    ranks: Ranks,
) -> TorchRunner:
    """Build one rank's part of a base; see `build_runner`."""
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device, _prefers_half(model_dir, settings))
    operators = choose_operators(device, dtype, settings.cpu_isa, settings.attention_backend)
    operators.ranks = ranks
    operators.division = division_of(settings, ranks, device, dtype)
    operators.attention_maker.kv_cache_dtype = _stored_kv(settings.kv_cache_dtype, dtype)
    logger.info("computing in %s with %s", dtype_name(dtype), operators.name)
    if isinstance(operators, NativeOperators):
        operators.native.set_threads(torch.get_num_threads())  # to pack weights
    model = _read_model(model_dir, settings, dtype, device, operators)
    _check_context(model.config, settings.max_model_len)
    share_threads(model.weight_bytes, operators, device)
    size = ArenaSize(settings.arena_bytes, settings.arena_share, settings.gpu_memory_utilization)
    largest = settings.max_num_batched_tokens, settings.max_num_seqs
    kv = allocate(size, model, operators, dtype, device, largest)
    sites = model.site_weights
    geometry = base_geometry(model_dir, model.config, sites.table)
    base_key = weights_key(model_dir, geometry, settings.quantization)
    stored = stored_dtype(settings.lora_dtype, operators, kv)
    layout = _adapter_layout(model, kv, operators, settings.max_lora_rank, base_key, stored)
    log_division(layout)
    packer = Packer(geometry, layout, SiteValues(sites, layout, device))
    model.ropes.reserve(settings.max_resident)
    host = _pinned_cache(kv.arena, settings.host_cache_bytes)
    loader = AdapterLoader(kv.arena, packer, model.ropes, host, executors)
    info = _model_info(model, layout, geometry, kv, operators, settings)
    batches = _batch_maker(model, operators, kv, loader.table, layout, settings)
    if isinstance(operators, NativeOperators):
        operators.native.weights.use_huge_pages()
        if ranks.shard.size == 1:
            programs = StepPrograms(operators.native, model, settings.max_num_batched_tokens)
            model.pass_layers = programs.forward
    gc.freeze()  # full collections need not visit what stays, which saves 4% of a step's time
    _return_freed_memory()
    return TorchRunner(model, loader, info, batches, operators, settings.overlap)


def _return_freed_memory() -> None:
    """Give the system what loading has freed, which glibc would keep."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _are_rows_alike(config: ModelConfig, operators: Operators) -> bool:
    """Whether the bits of a token's logits are independent of the other tokens of a step. They are
    not always in Gemma 4, whose layers differ in shape. In a mixture of experts, the number of rows
    that one expert computes varies, and only compiled kernels do not depend on it. Whether they
    compute the experts is known once the model is built."""
    if not isinstance(operators, NativeOperators) or operators.attention_maker.name:
        return False
    is_uniform = not (config.own_kv_heads or operators.loops_experts)
    return is_uniform and operators.ranks.shard.size == 1


def _adapter_layout(
    model: Decoder, kv: KvBuffer, operators: Operators, max_rank: int, base_key: str, stored: str
) -> AdapterLayout:
    """How adapters are packed for this base; `base_key` names its weights."""
    return AdapterLayout(
        block_bytes=kv.arena.block_bytes,
        dtype=dtype_key(kv.dtype),
        keeps_half=isinstance(operators, NativeOperators),
        max_rank=max_rank,
        base_key=base_key,
        sites=model.site_weights.table,
        ropes=base_ropes(model.config),
        stored=stored,
        shard=operators.ranks.shard,
    )


def _pinned_cache(arena: ArenaBuffer, num_bytes: int) -> PinnedCache | None:
    """Packed images in `num_bytes` of pinned memory, 0 = a share of the machine's. None on a CPU,
    where reading the page cache is as fast."""
    if not arena.data.is_cuda:
        return None
    if not num_bytes:
        host = memory_of(torch.device("cpu"))
        num_bytes = default_host_cache_bytes(host, torch.cuda.device_count())
    logger.info("pinning %d bytes of host memory for adapters", num_bytes)
    return PinnedCache(arena, num_bytes)


def _prefers_half(folder: Path, settings: RunnerSettings) -> bool:
    """See `numerics.prefers_half`. A folder without readable weights is refused later, by name."""
    if settings.load_format != "auto":
        return False
    try:
        return prefers_half(*published(folder), settings.cpu_isa)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, LoraplexError):
        return False


def _batch_maker(
    model: Decoder,
    operators: Operators,
    kv: KvBuffer,
    adapters: AdapterTable,
    layout: AdapterLayout,
    settings: RunnerSettings,
) -> BatchMaker:
    """Where Triton computes, with device tables, workspace and captured graphs."""
    is_native = isinstance(operators, NativeOperators)
    gpu = None
    if operators.name == "triton":
        from loraplex_services.worker.runner.gpu_path import GpuPath

        gpu = GpuPath(model, operators, kv, adapters, settings, layout.int8)
    return BatchMaker(
        kv,
        model.ropes,
        adapters,
        max_num_tokens=settings.max_num_batched_tokens,
        max_num_rows=settings.max_num_seqs,
        attention=operators.attention_maker,
        records=Records(adapters, len(layout.sites.sites)) if is_native else None,
        gpu=gpu,
    )


def _check_context(config: ModelConfig, max_model_len: int) -> None:
    """Raises InvalidRequest if `max_model_len` is longer than the context of the base."""
    if max_model_len > (own := config.max_position_embeddings):
        why = f"must be at most the context of the base, which is {own} tokens"
        raise InvalidRequest.field("max_model_len", max_model_len, why)


def _read_model(
    folder: Path,
    settings: RunnerSettings,
    dtype: torch.dtype,
    device: torch.device,
    operators: Operators,
) -> Decoder:
    """The base with its weights; a terminal shows the progress of reading them."""
    impl, on_load = settings.model_impl, settings.quantization
    quantisation = quantisation_of(read_json_object(folder / "config.json"))
    if quantisation is not None and settings.kv_cache_dtype == AUTO:
        store_as_published(quantisation.kv_cache, operators.attention_maker)
    if impl == "transformers" or (impl == "auto" and not has_family(folder)):
        check_library(on_load)
        free_bytes = memory_of(torch.device("cpu")).free_bytes
        return build_library_model(folder, dtype, device, operators, free_bytes)
    family, config = read_model_config(folder)
    method = None if quantisation is None else quantisation.method
    check_on_load(on_load, device, method, has_experts=config.moe is not None)
    with ProgressBar(folder.name) as bar:
        weights = _weights(settings.load_format, folder, dtype, device, bar)
        if quantisation is not None and isinstance(weights, Checkpoint):
            weights = QuantisedCheckpoint(weights, quantisation)
        elif on_load != NONE:
            weights = QuantisedOnLoad(weights, on_load)
        drafts = settings.drafts and settings.overlap != "on" and _are_rows_alike(config, operators)
        draft_head = build_draft_head(config, weights, operators) if drafts else None
        model = family.build(config, weights, operators)
        if _are_rows_alike(config, operators):
            model.draft_head = draft_head
        return model


def _stored_kv(wanted: str, dtype: torch.dtype) -> str:
    """See `AttentionMaker.kv_cache_dtype`. Raises Unsupported for another float type than the
    model's."""
    if wanted not in FLOAT_DTYPES:
        return wanted
    if FLOAT_DTYPES[wanted] != dtype:
        why = f"the model computes in {dtype_name(dtype)}: use auto, or --dtype {wanted} as well"
        raise Unsupported.field("kv_cache_dtype", wanted, why)
    return AUTO


def store_as_published(kv_cache: str, maker: AttentionMaker) -> None:
    """Keep keys and values in the type that the base's files ask for. Mutates: maker.

    Args:
        kv_cache: see `Quantisation.kv_cache`.
    """
    if not kv_cache:
        return
    if kv_cache in maker.backend.kv_cache_dtypes:
        maker.kv_cache_dtype = kv_cache
        logger.info("keys and values are kept in %s, as the base's config.json asks", kv_cache)
    else:
        what = "the base's config.json asks for keys and values in %s, which %s does not store"
        logger.warning(f"{what}: they stay in the model's dtype", kv_cache, maker.backend.__name__)


def _weights(
    load_format: str, folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Weights:
    if load_format == "dummy":
        return DummyWeights(dtype, device)
    if load_format != "auto":
        raise InvalidRequest.field("load_format", load_format, "must be auto or dummy")
    return Checkpoint(folder, dtype, device, progress)


def _quantization(on_load: str, kv_cache_dtype: str) -> str:
    """The names of what this worker stores in fewer bits: linears that were published in full, and
    the KV cache; "" = nothing."""
    parts = [] if on_load == NONE else [on_load]
    if kv_cache_dtype != AUTO:
        parts.append(f"kv-{kv_cache_dtype}")
    return "-".join(parts)


def _possible(eos_token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The ids that have a logit. The defaults of small test bases are often beyond the
    vocabulary."""
    return tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)


def _model_info(
    model: Decoder,
    layout: AdapterLayout,
    geometry: Geometry,
    kv: KvBuffer,
    operators: Operators,
    settings: RunnerSettings,
) -> ModelInfo:
    config, num_ranks, max_model_len = model.config, layout.shard.size, settings.max_model_len
    device, dtype = kv.arena.data.device, kv.dtype
    is_alike = not isinstance(model, LibraryDecoder) and _are_rows_alike(config, operators)
    arithmetic = operators.name + (f"-{layout.stored}" if layout.stored != "auto" else "")
    if attention := operators.attention_maker.name:
        arithmetic += f"-{attention}"
    if scheme := _quantization(settings.quantization, operators.attention_maker.kv_cache_dtype):
        arithmetic += f"-{scheme}"
    if num_ranks > 1:  # sums have another order
        both = [str(site.id) for site in layout.sites.sites if site.divides_both]
        arithmetic += "-".join((f"-tp{num_ranks}", *both))
    return ModelInfo(
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or config.max_position_embeddings,
        caps_context=max_model_len > 0,
        eos_token_ids=_possible(config.eos_token_ids, config.vocab_size),
        dtype=dtype_name(dtype),
        device=device.type,
        kernels=operators.name.removeprefix("native-"),
        quantization=scheme,
        numerics_fingerprint=fingerprint(geometry.fingerprint, device, dtype, arithmetic),
        geometry=geometry,
        rope_switch_len=config.rope_switch_len,
        verifies_drafts=is_alike,
        proposal_cost=model.proposal_cost,
        expert_share=model.expert_share,
        active_experts=model.active_experts,
        routing=model.routing,
    )
