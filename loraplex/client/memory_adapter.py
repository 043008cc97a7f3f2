"""Writes an adapter that is in this process's memory as the files that PEFT would save."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loraplex.adapter_format import CONFIG_FILE, TENSOR_FILE
from loraplex.adapter_format.safetensors_header import LENGTH_BYTES, prefix_bytes
from loraplex.client.sent_files import MemoryFile
from loraplex.errors import InvalidAdapter, InvalidRequest, Unsupported, Violation


def memory_files(state_dict: Mapping[str, Any], config: Any) -> list[MemoryFile]:
    """adapter_config.json and adapter_model.safetensors, in this order.

    The tensors may be on any device. They are copied, so that training may continue in the
    meantime.

    Raises:
        InvalidRequest: a value is not a tensor, or the config is not a PEFT config.
        Unsupported: safetensors is not installed.
    """
    return [
        MemoryFile(CONFIG_FILE, _config_json(config)),
        MemoryFile(TENSOR_FILE, _safetensors(state_dict)),
    ]


def header_of(tensors: MemoryFile) -> bytes:
    """The header of the tensor file, which validation reads. Raises: InvalidAdapter."""
    first = tensors.content[:LENGTH_BYTES]
    return tensors.content[: prefix_bytes(first, tensors.size_bytes)]


def _config_json(config: Any) -> bytes:
    fields = config if isinstance(config, Mapping) else getattr(config, "to_dict", lambda: None)()
    if not isinstance(fields, Mapping):
        raise InvalidRequest.field(
            "config", type(config).__name__, "must be a PeftConfig or the content of its JSON file"
        )
    try:
        return json.dumps(fields, indent=2, sort_keys=True, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest.field("config", "", f"cannot be written as JSON: {error}") from None


def _plain(value: object) -> object:
    """A value as JSON has it. PEFT's configs contain sets."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _safetensors(state_dict: Mapping[str, Any]) -> bytes:
    if not state_dict:
        raise InvalidAdapter.of([Violation.of(TENSOR_FILE, "", "there are no tensors")])
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise Unsupported(
            f"publishing from memory needs torch and safetensors ({error}): pip install safetensors"
        ) from None
    tensors = {}
    for name, tensor in state_dict.items():
        if not hasattr(tensor, "detach"):
            raise InvalidRequest.field(
                f"state_dict[{name}]", type(tensor).__name__, "must be a tensor of torch"
            )
        # Tensors that share memory are saved one by one, as PEFT does.
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    data: bytes = save(tensors, metadata={"format": "pt"})
    return data
