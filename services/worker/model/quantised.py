"""The weights of a quantised base: kept quantised if a kernel reads them, otherwise dequantised."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loraplex.adapter_format.quantisation import (
    AWQ,
    BLOCKS,
    BNB4,
    BNB8,
    GPTQ,
    PACKED,
    PLAIN,
    Quantisation,
    Scheme,
)
from loraplex.errors import InvalidRequest
from loraplex_services.worker.model.formats import awq, bitsandbytes, compressed_tensors, gguf, gptq
from loraplex_services.worker.model.formats.words import ReadWeight
from loraplex_services.worker.model.load import Checkpoint, StackedRows, TensorWindow
from loraplex_services.worker.ops.linear.coded import CodedWeight
from loraplex_services.worker.ops.linear.torch import WeightRows

logger = logging.getLogger(__name__)

READERS: Mapping[str, ReadWeight] = {
    AWQ: awq.read,
    BLOCKS: compressed_tensors.read_plain,
    BNB4: bitsandbytes.read_four_bits,
    BNB8: bitsandbytes.read_eight_bits,
    "gguf-Q4_0": gguf.read_q4_0,
    "gguf-Q4_K": gguf.read_q4_k,
    "gguf-Q5_0": gguf.read_q5_0,
    "gguf-Q5_K": gguf.read_q5_k,
    "gguf-Q6_K": gguf.read_q6_k,
    "gguf-Q8_0": gguf.read_q8_0,
    GPTQ: gptq.read,
    PACKED: compressed_tensors.read_packed,
    PLAIN: compressed_tensors.read_plain,
}
_PACKED_NAMES = ("qweight", "weight_packed")
_UNUSED = (
    ".input_scale", ".input_zero_point", ".k_scale", ".v_scale", ".q_scale", ".output_scale",
    ".activation_scale", ".activation_scale_inv",
)  # fmt: skip
"""Scales of activations and of the KV cache, which are not quantised here."""


class QuantisedCheckpoint:
    """Implements `load.Weights` over files some of whose linears are quantised."""

    def __init__(self, files: Checkpoint, quantisation: Quantisation) -> None:
        self.dtype = files.dtype
        self._files = files
        self._quantisation = quantisation
        self._read_again: tuple[str, CodedWeight] | None = None
        """The last weight of `read_again`, whose rows are asked for a few at a time."""

    def has(self, name: str) -> bool:
        """Whether the files hold it, in codes or not."""
        return self._files.has(name) or self.module_in_codes(name) is not None

    def take(
        self,
        name: str,
        shape: Sequence[int],
        window: TensorWindow | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `load.Weights`; codes are dequantised."""
        if (coded := self.take_codes(name, shape)) is None:
            return self._files.take(name, shape, window, dtype)
        wide = coded.dequantised()
        return (wide if window is None else window.cut(wide)).to(dtype or self.dtype)

    def half_dtype(self, name: str) -> torch.dtype | None:
        """See `load.Weights`; None for codes."""
        return self._files.half_dtype(name) if self.module_in_codes(name) is None else None

    def take_codes(self, name: str, shape: Sequence[int]) -> CodedWeight | None:
        """A weight as it is stored; None if it is not in codes.

        Raises:
            InvalidRequest: it does not fit the config.
        """
        module = self.module_in_codes(name)
        if module is None:
            return None
        scheme = self._scheme_of(module)
        num_outputs, num_inputs = shape
        return READERS[scheme.layout](self._files, module, (num_outputs, num_inputs), scheme)

    def _scheme_of(self, module: str) -> Scheme:
        if (scheme := self._quantisation.scheme_of(module)) is None:
            why = "holds codes, but no group of quantization_config names it"
            raise InvalidRequest.field(module, "quantised", why)
        return scheme

    def module_in_codes(self, name: str) -> str | None:
        """The module of a weight that the files hold in codes; None for other tensors."""
        module, _, last = name.rpartition(".")
        if last != "weight":
            return None
        if any(self._files.has(f"{module}.{packed}") for packed in _PACKED_NAMES):
            return module
        is_coded = self._files.has(name) and not self._files.is_float(name)
        return module if is_coded else None

    def rows_in_files(self, parts: Sequence[tuple[str, int]], num_inputs: int) -> WeightRows:
        """See `load.Weights`; codes are dequantised."""
        if all(self.module_in_codes(name) is None for name, _ in parts):
            return self._files.rows_in_files(parts, num_inputs)
        plain = {
            name: self._files.rows_in_files([(name, rows)], num_inputs)
            for name, rows in parts
            if self.module_in_codes(name) is None
        }

        def read(name: str, num_rows: int, window: TensorWindow) -> Tensor:
            if name in plain:
                return torch.cat([plain[name].weight_rows(*span) for span in window.rows])
            coded = self.read_again(name, (num_rows, num_inputs))
            return coded.outputs(window.rows).dequantised()

        return StackedRows(parts, num_inputs, read)

    def read_again(self, name: str, shape: Sequence[int]) -> CodedWeight:
        """A weight in codes, from files that `finish` has closed."""
        if self._read_again is None or self._read_again[0] != name:
            with contextlib.closing(self._files.reopened()) as files:
                coded = QuantisedCheckpoint(files, self._quantisation).take_codes(name, shape)
            assert coded is not None, name
            self._read_again = name, coded
        return self._read_again[1]

    def finish(self) -> None:
        """See `load.Weights`."""
        self._files.ignore(self._is_unused)
        self._files.finish()

    def _is_unused(self, name: str) -> bool:
        """Activations are not quantised here; and writers of GPTQ files add biases of zeros."""
        module, _, last = name.rpartition(".")
        if last == "bias" and self._files.has(f"{module}.qweight"):
            return not self._files.stored(name).any()
        return name.endswith(_UNUSED)
