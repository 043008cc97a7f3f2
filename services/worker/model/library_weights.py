"""The weights of a quantised base for the transformers library, which reads none of the codes here.

The library takes tensors by name, in place of files. Each is read when it is taken, and what is in
codes is dequantised by the readers of the families here. Two copies of the base never exist.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraplex.adapter_format.geometry import EMBEDDING, LM_HEAD, NORM, Geometry
from loraplex.adapter_format.quantisation import Quantisation
from loraplex.errors import InvalidRequest, LoraplexError
from loraplex_services.worker.model.load import Checkpoint, tensor_names
from loraplex_services.worker.model.quantised import QuantisedCheckpoint

logger = logging.getLogger(__name__)


class _Tensor:
    """A tensor that is read when the library takes all of its elements."""

    def __init__(self, name: str, shape: tuple[int, int] | None, source: _Source) -> None:
        self._name = name
        self._shape = shape
        self._source = source

    def __getitem__(self, _all: Any) -> Tensor:
        return self._source.read(self._name, self._shape)


class _Source:
    """Reads tensors, and keeps the first error, which the library would put in other words."""

    def __init__(self, files: Checkpoint, weights: QuantisedCheckpoint) -> None:
        self.error: LoraplexError | None = None
        self._files = files
        self._weights = weights

    def read(self, name: str, shape: tuple[int, int] | None) -> Tensor:
        """A tensor in its own dtype, or a weight `[out, in]` of this shape in float32 if it is in
        codes."""
        try:
            codes = None if shape is None else self._weights.take_codes(name, shape)
            if codes is not None:
                return codes.dequantised()
            if not self._files.is_float(name):
                why = "holds codes that quantization_config does not explain"
                raise InvalidRequest.field(name, "quantised", why)
            return self._files.stored(name)
        except LoraplexError as error:
            self.error = self.error or error
            raise


@contextmanager
def dequantised(
    folder: Path,
    geometry: Geometry,
    quantisation: Quantisation,
    dtype: torch.dtype,
    free_bytes: int,
) -> Iterator[dict[str, Any]]:
    """The tensors of a quantised base by their names in the files, for a model of a dtype.

    Raises:
        InvalidRequest: the model takes more than `free_bytes`, or a tensor that was taken does not
            fit the config.
    """
    _check_memory(geometry, quantisation, dtype, free_bytes)
    files = Checkpoint(folder, torch.float32, torch.device("cpu"))
    weights = QuantisedCheckpoint(files, quantisation)
    source = _Source(files, weights)
    shapes = {
        f"{module.name}.weight": (module.out_features, module.in_features)
        for module in geometry.modules
        if module.kind not in (EMBEDDING, NORM)
    }
    coded = {name for name in shapes if weights.module_in_codes(name)}
    names = {name for name in tensor_names(folder) if not _is_of_codes(name, coded)} | coded
    try:
        yield {name: _Tensor(name, shapes.get(name), source) for name in names}
    finally:
        files.close()
        if source.error is not None:
            raise source.error


def _is_of_codes(name: str, coded: Container[str]) -> bool:
    """Whether a tensor is read together with one of these weights in codes."""
    module, _, last = name.rpartition(".")
    weight, _, _ = name.partition(".weight.")
    return f"{weight}.weight" in coded or (f"{module}.weight" in coded and last != "bias")


def _check_memory(
    geometry: Geometry, quantisation: Quantisation, dtype: torch.dtype, free_bytes: int
) -> None:
    shared = (NORM, LM_HEAD) if geometry.tied_embeddings else (NORM,)
    matrices = (m.in_features * m.out_features for m in geometry.modules if m.kind not in shared)
    num_bytes = sum(matrices) * dtype.itemsize
    logger.info(
        "the base is quantised, and is dequantised, because it runs through the transformers "
        "library",
        extra={"scheme": quantisation.name, "dtype": str(dtype), "num_bytes": num_bytes},
    )
    if num_bytes > free_bytes:
        why = (
            f"takes {num_bytes} bytes in {str(dtype).removeprefix('torch.')}, because it is "
            f"dequantised for the transformers library, and {free_bytes} bytes of memory are free; "
            "choose a smaller base, or --dtype bfloat16"
        )
        raise InvalidRequest.field("config.json:quantization_config", quantisation.method, why)
