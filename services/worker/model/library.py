"""Serves bases without a family here with the class of the transformers library.

The library's forward pass is not changed. Its linears and its embedding are replaced by sites that
adapters can change, and its attention uses the paged cache through the library's registry of
attention functions. A pass over two tokens shows how each layer calls attention. A base that cannot
be served in this way is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loraplex.adapter_format.geometry import geometry_from_folder
from loraplex.adapter_format.quantisation import read_quantisation
from loraplex.errors import InvalidRequest, LoraplexError, Unsupported
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.library_falcon import add_falcon_attention
from loraplex_services.worker.layers.library_modules import (
    ATTENTION,
    AttentionCall,
    CurrentPass,
    are_gated_experts,
    attend,
    is_product,
)
from loraplex_services.worker.layers.library_routers import routers_noted
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model.config_reader import eos_token_ids, read_json_object
from loraplex_services.worker.model.library_decoder import (
    LibraryDecoder,
    LibrarySites,
    body_name,
)
from loraplex_services.worker.model.library_weights import dequantised
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.types.model_config import KvHeads, ModelConfig

_MODEL_TYPE = "config.json:model_type"
_CHUNKED = "chunked_attention"
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", _CHUNKED}
_OWN_ATTENTION = {"falcon": add_falcon_attention}
"""Model types whose classes call attention in a way of their own, and what changes them."""
_CHANGING_ROPES = {"dynamic", "longrope", "su"}
"""Their tables depend on the longest sequence of a batch."""
_NOT_EXPECTED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that a class may raise when it is called in a way that it does not know."""


def build_library_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    operators: Operators,
    free_bytes: int,
) -> LibraryDecoder:
    """Load a base with the transformers library.

    Args:
        free_bytes: memory that a quantised base may take, because it is dequantised.

    Raises:
        Unsupported: the library is missing, or the model cannot be run through it.
        InvalidRequest: the library cannot read the base.
    """
    if device.type != "cpu":
        raise _refused("device", device.type, "models of the transformers library run on CPUs only")
    model, names = _load(folder, dtype, free_bytes)
    current = CurrentPass()
    calls, called, routers = _attention_calls(model, current)
    config = _model_config(model.config, folder, calls)
    maker = operators.attention_maker
    for call in calls:
        sinks = current.sinks.get(call.layer)
        current.backends[call.layer] = maker.layer(config, call.source, sinks, rotated=True)
    sites = LibrarySites(model, config, names, called, routers, operators, current)
    decoder = sites.decoder()
    with torch.inference_mode(), _odd_class_refused(model):
        _try(decoder, maker)
    return decoder


def _try(decoder: LibraryDecoder, maker: AttentionMaker) -> None:
    """Run two tokens without a cache, and the head. A class may use something of the replaced
    modules that the new ones lack."""
    ids = torch.zeros(2, dtype=torch.int64)
    positions, lora = torch.arange(2), LoraBatch((), {})
    metadata = maker.pass_metadata(positions)
    hidden = decoder.forward(ForwardBatch(ids, positions, metadata, lora))
    decoder.logits(hidden, lora)


def _refused(field_name: str, value: object, why: str) -> Unsupported:
    if field_name == _MODEL_TYPE:
        why = f"{value!r} {why}; docs/reference/bases.md lists the types that are served"
    return Unsupported.field(field_name, value, why)


def _load(folder: Path, dtype: torch.dtype, free_bytes: int) -> tuple[Any, frozenset[str]]:
    """The model, and its modules' names in the files."""
    try:
        import transformers
    except ImportError:
        model_type = read_json_object(folder / "config.json").get("model_type")
        why = (
            "runs through the transformers library only, which is not installed; run "
            ".venv/bin/pip install 'transformers>=5'"
        )
        raise _refused(_MODEL_TYPE, model_type, why) from None
    library: Any = transformers  # parts of it have no types
    library.AttentionInterface.register(ATTENTION, attend)
    library.utils.logging.disable_progress_bar()
    try:
        config = library.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        classes = library.MODEL_FOR_CAUSAL_LM_MAPPING
        _check_config(config, classes)
        quantisation = read_quantisation(read_json_object(folder / "config.json"))
        geometry = geometry_from_folder(folder)  # names a file that is missing or damaged
        read = partial(
            classes[type(config)].from_pretrained,
            config=config.get_text_config(),
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        if quantisation is None:
            model, loading = read(folder)
        else:
            del config.quantization_config
            with dequantised(folder, geometry, quantisation, dtype, free_bytes) as tensors:
                model, loading = read(None, state_dict=tensors)
    except LoraplexError:
        raise
    except Exception as error:  # whatever its many classes raise
        first_line = str(error).partition("\n")[0]
        why = f"the transformers library cannot load it: {first_line or type(error).__name__}"
        raise InvalidRequest.field("model", folder.name, why) from error
    _check_complete(loading)
    _check_tied(model)
    names = frozenset(module.name for module in geometry.modules)
    return model.eval().requires_grad_(False), names


def _check_complete(loading: dict[str, Any]) -> None:
    """Refuse a base if the library would initialise some of its weights at random."""
    for name, got, wanted in sorted(loading["mismatched_keys"]):
        raise InvalidRequest.field(name, list(got), f"config.json asks for shape {list(wanted)}")
    for name in sorted(loading["missing_keys"]):
        raise InvalidRequest.field(name, "missing", "the base's files lack this tensor")


def _check_tied(model: Any) -> None:
    """Refuse a head of its own where the config says that it is the embedding, as PEFT believes."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and not head.weight.equal(table.weight):
        why = "differs from the embedding, but tie_word_embeddings is true"
        raise InvalidRequest.field("lm_head.weight", "present", why)


def _check_config(config: Any, classes: Any) -> None:
    """Refuse what is known to fail before any weight is read."""
    wrapper, config = config, config.get_text_config()
    if wrapper is not config and getattr(wrapper, "quantization_config", None) is not None:
        why = "is not served for multimodal bases that run through the transformers library"
        raise _refused("config.json:quantization_config", "present", why)
    if wrapper is not config and not _unwraps(classes, wrapper):
        why = "is multimodal, and such bases do not run through the transformers library"
        raise _refused(_MODEL_TYPE, wrapper.model_type, why)
    if config.is_encoder_decoder or type(config) not in classes:
        why = "is not a causal language model of the transformers library"
        raise _refused(_MODEL_TYPE, config.model_type, why)
    types = getattr(config, "layer_types", None) or ()
    for name in types:
        if name not in _LAYER_TYPES:
            why = f"layers of type {name!r} are not served"
            raise _refused("config.json:layer_types", name, why)
    if _CHUNKED in types and not getattr(config, "attention_chunk_size", None):
        raise _refused("config.json:attention_chunk_size", None, f"is required by {_CHUNKED}")
    if config.model_type in _OWN_ATTENTION:
        _OWN_ATTENTION[config.model_type](config)
    elif not classes[type(config)]._supports_attention_backend:
        why = "computes attention in a way that cannot be given another cache"
        raise _refused(_MODEL_TYPE, config.model_type, why)
    rope = getattr(config, "rope_parameters", None) or {}
    for params in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if params.get("rope_type") in _CHANGING_ROPES:
            why = "is not served through the transformers library"
            raise _refused("config.json:rope_parameters.rope_type", params["rope_type"], why)


def _unwraps(classes: Any, wrapper: Any) -> bool:
    """Whether the library reads the text model alone out of a multimodal base's files."""
    known = type(wrapper) in classes
    return known and classes[type(wrapper)].config_class is type(wrapper.get_text_config())


@torch.inference_mode()
def _attention_calls(
    model: Any, current: CurrentPass
) -> tuple[list[AttentionCall], set[nn.Module], set[nn.Module]]:
    """How each layer calls attention, the linears and experts that are called, and the routers,
    determined by a pass over two tokens.

    Raises:
        Unsupported: not every layer does, or not all in the same way.
    """
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.loraplex_pass = current
    ids, positions = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None]
    body = model.get_submodule(body_name(model))
    activation = getattr(body.config, "hidden_act", None)
    modules = dict(body.named_modules())
    with _odd_class_refused(model):
        # Each is called here, before any call is noted.
        known = {
            name: module
            for name, module in modules.items()
            if is_product(module) or are_gated_experts(module, activation)
        }
        others = [module for name, module in modules.items() if name not in known]
        noted = routers_noted(others, ids.numel())
        with _partial_rows_refused(known) as called, noted as routers:
            body(input_ids=ids, position_ids=positions, use_cache=False)
    num_layers = model.config.num_hidden_layers
    if sorted(current.calls) != list(range(num_layers)):
        why = f"calls attention in {len(current.calls)} of {num_layers} layers only"
        raise _refused(_MODEL_TYPE, model.config.model_type, why)
    current.keys.clear()
    calls = [current.calls[layer] for layer in range(num_layers)]
    if len({(call.num_heads, call.scale, call.softcap) for call in calls}) != 1:
        why = "has layers whose attention differs in query heads or scale"
        raise _refused(_MODEL_TYPE, model.config.model_type, why)
    if any(call.window != calls[call.source].window for call in calls):
        why = "has layers that read the keys of layers with another window"
        raise _refused(_MODEL_TYPE, model.config.model_type, why)
    _check_windows(model.config, calls)
    return calls, called, routers


@contextmanager
def _partial_rows_refused(modules: Mapping[str, nn.Module]) -> Iterator[set[nn.Module]]:
    """Collect the linears and experts that are called. Refuse those that do not see every token
    once: rows would meet the wrong adapters."""
    called: set[nn.Module] = set()
    seen: dict[str, list[torch.Size]] = {}

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        called.add(module)
        seen.setdefault(name, []).append(inputs[0].shape[:-1])

    hooks = [m.register_forward_pre_hook(partial(note, name)) for name, m in modules.items()]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()
    for name, shapes in seen.items():
        if [shape.numel() for shape in shapes] != [2]:
            raise _refused(name, "module", "does not see every token once, and is not served")


@contextmanager
def _odd_class_refused(model: Any) -> Iterator[None]:
    """Turn what a class does not expect of its caller into a refusal."""
    try:
        yield
    except _NOT_EXPECTED as error:
        why = f"{type(model).__name__} cannot be run in this way: {error}"
        raise _refused(_MODEL_TYPE, model.config.model_type, why) from error


def _check_windows(config: Any, calls: list[AttentionCall]) -> None:
    """Refuse windows that the model only writes into masks, which do not reach attention here."""
    types = getattr(config, "layer_types", None)
    has_window = getattr(config, "sliding_window", None) is not None
    uses_window = has_window and getattr(config, "use_sliding_window", True) is not False
    for call in calls:
        expected = uses_window if types is None else types[call.layer] == "sliding_attention"
        if expected != (call.window is not None):
            why = f"layer {call.layer} does not tell attention of its window"
            raise _refused("config.json:sliding_window", config.sliding_window, why)


def _model_config(config: Any, folder: Path, calls: list[AttentionCall]) -> ModelConfig:
    first = calls[0]
    types = getattr(config, "layer_types", None) or ()
    is_chunked = tuple(_CHUNKED in types[call.layer : call.layer + 1] for call in calls)
    return ModelConfig(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or config.hidden_size,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        norm_eps=0.0,
        activation="",
        max_position_embeddings=config.max_position_embeddings,
        tied_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=eos_token_ids(folder),
        windows=tuple(
            config.attention_chunk_size if chunked else call.window
            for call, chunked in zip(calls, is_chunked, strict=True)
        ),
        chunked=is_chunked,
        ropes=(),
        own_kv_heads=tuple(KvHeads(call.num_kv_heads, call.head_dim) for call in calls),
        kv_sources=tuple(call.source for call in calls),
        attention_scale=first.scale,
        attention_softcap=first.softcap,
    )
