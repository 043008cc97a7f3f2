"""The process in which PEFT converts an adapter of another method to LoRA.

    python -m loraplex.rewriting.other_methods_process ADAPTER BASE OUT.safetensors MAX_RANK

Prints one JSON object: the rank of each module, the largest relative error of a module, and whether
modules have biases of lora_B.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import peft
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from loraplex.adapter_format.text_model import is_wrapper
from loraplex.rewriting.child import limit_memory, refuse

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
WRAPPED_PART = "language_model."
"""A part of names that only the text modules of a multimodal base have."""
NEGLIGIBLE = 3e-6
"""Relative norm below which singular values of a module are dropped as rounding errors."""
LARGEST_DEVIATION = 1e-4
"""Largest relative deviation of a layer's result for random inputs from that of an update and a
bias. Rounding errors are below it; a method that is not linear is far above."""
SPARE_MEMORY_BYTES = 4 << 30
_CHUNK_ROWS, _NUM_PROBES = 1024, 8


def main() -> None:
    """Convert one adapter. Writes the file OUT."""
    folder, base, out, max_rank = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    limit_memory(4 * _size(base) + 8 * _size(folder) + SPARE_MEMORY_BYTES)
    try:
        convert(folder, base, out, int(max_rank))
    except MemoryError:
        why = "needs more memory than a base and an adapter of their sizes may; check its config"
        refuse(TENSOR_FILE, _size(folder), why)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def convert(folder: Path, base: Path, out: str, max_rank: int) -> None:
    """Convert one adapter. Writes the file `out`. Raises: MemoryError."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    model = _load(folder, base)
    config = model.peft_config["default"]
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    biases: dict[str, Tensor] = {}
    worst = 0.0
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        try:
            original, biases[f"{name}.lora_B.bias"] = _added(layer, config)
        except (RuntimeError, ValueError, TypeError) as error:
            _check_memory(error)
            why = f"cannot be computed ({str(error)[:200]}); train a LoRA"
            _refuse("peft_type", config.peft_type.value, why)
        a, b = _converted(layer, original, max_rank)
        ranks[name.removeprefix("base_model.model.")] = a.shape[0]
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
        worst = max(worst, _relative_error(original, a, b))
    has_bias = any(bias.any() for bias in biases.values())
    save_file(tensors | biases if has_bias else tensors, out)
    print("\n" + json.dumps({"ranks": ranks, "relative_error": worst, "lora_bias": has_bias}))


def _load(folder: Path, base: Path) -> Any:
    """The base in float32 with the adapter on it. Refuses what is not converted."""
    config = peft.PeftConfig.from_pretrained(str(folder))
    method = config.peft_type.value
    for field in ("modules_to_save", "trainable_token_indices"):
        if value := getattr(config, field, None):
            _refuse(field, value, f"is not converted together with {method}; train without")
    if getattr(config, "bias", "none") not in ("none", False):
        _refuse("bias", config.bias, f"is not converted together with {method}; train without")
    loader = getattr(transformers, _class_of(folder, base))
    model_of_base = loader.from_pretrained(str(base), dtype=torch.float32, local_files_only=True)
    warnings.filterwarnings("error", "Found missing adapter keys")  # which PEFT leaves as they are
    try:
        model = peft.PeftModel.from_pretrained(model_of_base, str(folder), config=config).eval()
    except (RuntimeError, ValueError, TypeError, UserWarning) as error:
        _check_memory(error)
        why = f"cannot be loaded by PEFT on this base ({str(error)[:200]}); check --base"
        _refuse("peft_type", method, why)
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    if not layers:
        why = "changes no weights, so no LoRA is equivalent to it; train a LoRA"
        _refuse("peft_type", method, why)
    for layer in layers:
        if not isinstance(layer.get_base_layer(), torch.nn.Linear):
            kind = type(layer.get_base_layer()).__name__
            why = f"is not converted from {method}, only linears are; train without"
            _refuse("target_modules", kind, why)
    return model


def _class_of(folder: Path, base: Path) -> str:
    """The class of transformers on which the adapter was trained. That of a multimodal base names
    its modules differently from that of its text model alone."""
    if not is_wrapper(json.loads((base / "config.json").read_text())):
        return "AutoModelForCausalLM"
    with safe_open(folder / TENSOR_FILE, "pt") as tensors:
        is_text_alone = not any(WRAPPED_PART in name for name in tensors.keys())
    return "AutoModelForCausalLM" if is_text_alone else "AutoModelForImageTextToText"


@torch.no_grad()
def _converted(layer: Any, original: Tensor, max_rank: int) -> tuple[Tensor, Tensor]:
    """A and B, without the singular vectors that are rounding errors.

    They are PEFT's if it converts the method, otherwise computed from `original`, `[out, in]`
    float64.
    """
    rank = min(max_rank, *original.shape)
    if layer.supports_lora_conversion("default"):
        _, found = peft.convert_to_lora(layer, rank=rank)
        a, b = (found[f".lora_{side}.weight"].float() for side in "AB")
    else:
        left, values, right = torch.linalg.svd(original, full_matrices=False)
        a, b = right[:rank].float(), (left * values)[:, :rank].float()
    # By descending singular values, which are the norms of B's columns; MiSS has no order.
    squares = b.double().square().sum(0).flip(0).cumsum(0).flip(0)
    count = max(1, int((squares > NEGLIGIBLE**2 * squares[0]).sum()))
    return a[:count].contiguous(), b[:, :count].contiguous()


@torch.no_grad()
def _added(layer: Any, config: peft.PeftConfig) -> tuple[Tensor, Tensor]:
    """The terms that a layer adds to the base's output: an update `[out, in]` float64 of its input,
    found with unit vectors, and a bias `[out]` float32, found with zeros. Refuses what is
    neither."""
    num_inputs = layer.get_base_layer().weight.shape[1]
    units = torch.eye(num_inputs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(_NUM_PROBES, num_inputs, dtype=torch.float64, generator=generator)
    exact = _in_type(layer, torch.float64)

    def added(rows: Tensor) -> Tensor:
        difference: Tensor = exact(rows) - exact.get_base_layer()(rows)
        return difference

    bias = added(torch.zeros_like(probes[:1]))[0]
    update = torch.cat([added(rows) - bias for rows in units.split(_CHUNK_ROWS)]).T
    found = added(probes)
    _in_type(layer, torch.float32)
    if (found - probes @ update.T - bias).norm() > LARGEST_DEVIATION * found.norm():
        why = (
            "is not linear in the inputs of a module, so no LoRA is equivalent to it; train a LoRA"
        )
        _refuse("peft_type", config.peft_type.value, why)
    return update, bias.float()


def _in_type(layer: Any, dtype: torch.dtype) -> Any:
    """The layer with its tensors in a type, in place."""
    if isinstance(getattr(layer, "dtype", None), torch.dtype):  # AdaMSS casts its inputs to it
        layer.dtype = dtype
    return layer.to(dtype)


def _relative_error(original: Tensor, a: Tensor, b: Tensor) -> float:
    """|B A - original| / |original|, Frobenius norms."""
    norm = original.norm()
    return float((b.double() @ a.double() - original).norm() / norm) if norm else 0.0


def _check_memory(error: Exception) -> None:
    """Raises MemoryError if torch could not allocate memory."""
    if "allocate" in str(error):
        raise MemoryError from None


def _refuse(field: str, value: object, description: str) -> NoReturn:
    refuse(f"{CONFIG_FILE}:{field}", value, description)


if __name__ == "__main__":
    main()
