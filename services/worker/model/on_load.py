"""Quantises a full-precision base when it is loaded: `--quantization`.

Linears become int8 or float8 with a scale for each row, or int4 with a scale for each group of
inputs. The head becomes int8 in every scheme, because it is both large and sensitive. Embeddings,
norms, biases and the routers of mixtures of experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.model.load import TensorWindow, Weights
from loraplex_services.worker.ops.linear.coded import FLOAT8, INTEGERS, CodedWeight
from loraplex_services.worker.ops.linear.torch import WeightRows

NONE, INT8, INT4, FP8 = "none", "int8", "int4", "fp8"
GROUP_SIZE = 64
"""Inputs that share a scale in int4."""
TABLE = "model.embed_tokens.weight"
_HEADS = ("lm_head.weight", TABLE)
_ROUTERS = (".gate.weight", ".router.proj.weight", ".shared_expert_gate.weight")
"""Routers are small, and a small error changes which experts they choose."""
CHUNK_ROWS = 4096
"""Rows that exist in float32 at once."""


class QuantisedOnLoad:
    """Implements `load.Weights` over plain ones: linears are offered in codes."""

    def __init__(self, files: Weights, scheme: str) -> None:
        """`scheme`: one of `SCHEMES`."""
        self.dtype = files.dtype
        self._files = files
        self._scheme = scheme

    def has(self, name: str) -> bool:
        """See `load.Weights`."""
        return self._files.has(name)

    def take(
        self,
        name: str,
        shape: Sequence[int],
        window: TensorWindow | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `load.Weights`; as the files have it. Experts whose codes no kernel reads are taken
        here, as dequantised codes.

        Raises Unsupported for the experts of files that store those of a layer as one tensor.
        """
        if ".experts." in name and len(shape) > 2:
            why = (
                f"is not served for files that hold all experts of a layer in one tensor ({name}); "
                "leave it out"
            )
            raise Unsupported.field("quantization", self._scheme, why)
        if ".experts." in name and name.endswith(".weight"):
            wide = SCHEMES[self._scheme](self._files.take(name, shape)).dequantised()
            return (wide if window is None else window.cut(wide)).to(dtype or self.dtype)
        return self._files.take(name, shape, window, dtype)

    def half_dtype(self, name: str) -> torch.dtype | None:
        """See `load.Weights`; None for experts, whose codes are dequantised."""
        return None if ".experts." in name else self._files.half_dtype(name)

    def take_codes(self, name: str, shape: Sequence[int]) -> CodedWeight | None:
        """See `load.Weights`; None for routers."""
        if name.endswith(_ROUTERS):
            return None
        weight = self._files.take(name, shape)
        if name in _HEADS:
            rows, columns = shape
            return replace(
                int8(weight), published=self._files.rows_in_files([(name, rows)], columns)
            )
        return SCHEMES[self._scheme](weight)

    def rows_in_files(self, parts: Sequence[tuple[str, int]], num_inputs: int) -> WeightRows:
        """See `load.Weights`. Rows are dequantised codes, except those of the embedding."""
        rows, names = self._files.rows_in_files(parts, num_inputs), {name for name, _ in parts}
        if names == {TABLE}:
            return rows
        return _QuantisedRows(rows, int8 if names <= {*_HEADS} else SCHEMES[self._scheme])

    def finish(self) -> None:
        """See `load.Weights`."""
        self._files.finish()


class _QuantisedRows:
    """Implements `WeightRows`: rows of a weight after quantisation, each quantised separately."""

    def __init__(self, rows: WeightRows, quantise: Callable[[Tensor], CodedWeight]) -> None:
        self._rows = rows
        self._quantise = quantise
        self.in_features, self.out_features = rows.in_features, rows.out_features

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        rows = self._rows.weight_rows(begin, end)
        return self._quantise(rows).dequantised() if begin < end else rows


def int8(weight: Tensor) -> CodedWeight:
    """`[out, in]`, with the largest magnitude of each row as 127."""
    codes, scales = [], []
    for wide, scale in _row_scales(weight, 127):
        codes.append((wide / scale).round().to(torch.int8))
        scales.append(scale)
    return CodedWeight(INT8, torch.cat(codes), torch.cat(scales), weight.shape[1])


def fp8(weight: Tensor) -> CodedWeight:
    """`[out, in]`, with the largest magnitude of each row as 448, the largest of e4m3."""
    largest = torch.finfo(FLOAT8).max
    codes, scales = [], []
    for wide, scale in _row_scales(weight, largest):
        # A value that rounding has put above the largest one would become NaN.
        codes.append((wide / scale).clamp(-largest, largest).to(FLOAT8))
        scales.append(scale)
    return CodedWeight(FP8, torch.cat(codes), torch.cat(scales), weight.shape[1])


def _row_scales(weight: Tensor, largest: float) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, the scale of each that makes its largest magnitude `largest`), float32."""
    for rows in weight.split(CHUNK_ROWS):
        wide = rows.float()
        yield wide, _without_zeros(wide.abs().amax(1, keepdim=True) / largest)


def int4(weight: Tensor) -> CodedWeight:
    """`[out, in]`, with the value of largest magnitude of each group as -8: scales have a sign."""
    num_inputs = weight.shape[1]
    padding = -num_inputs % GROUP_SIZE
    codes, scales = [], []
    for rows in weight.split(CHUNK_ROWS):
        wide = torch.nn.functional.pad(rows.float(), (0, padding)).view(len(rows), -1, GROUP_SIZE)
        largest = wide.gather(2, wide.abs().argmax(2, keepdim=True))
        scale = _without_zeros((largest / -8).bfloat16())
        code = (wide / scale.float()).round().clamp(-8, 7) + 8
        codes.append(code.to(torch.uint8).flatten(1)[:, :num_inputs])
        scales.append(scale[..., 0])
    name = f"{INT4}-g{GROUP_SIZE}"
    table = INTEGERS - 8
    return CodedWeight(name, torch.cat(codes), torch.cat(scales), GROUP_SIZE, table=table)


SCHEMES: Mapping[str, Callable[[Tensor], CodedWeight]] = {INT8: int8, INT4: int4, FP8: fp8}
"""The form of a linear, by the setting's value."""


def _without_zeros(scales: Tensor) -> Tensor:
    """The scales with ones for zeros; the codes of such rows are all zero."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def check_library(scheme: str) -> None:
    """Raises Unsupported for any scheme, because bases that run through the transformers library
    are not quantised on load."""
    if scheme != NONE:
        why = "is not served for bases that run through the transformers library"
        raise Unsupported.field("quantization", scheme, why)


def check_on_load(
    scheme: str, device: torch.device, method: str | None, *, has_experts: bool
) -> None:
    """Refuse what cannot be quantised on load.

    Args:
        method: of the base's own quantisation; None = its weights are plain.
        has_experts: whether the base is a mixture of experts.

    Raises:
        InvalidRequest: no such scheme, or the base is quantised already.
        Unsupported: no kernel reads the codes of experts on this device.
    """
    field = "quantization"
    if scheme == NONE:
        return
    if scheme not in SCHEMES:
        raise InvalidRequest.field(field, scheme, f"must be none, {', '.join(SCHEMES)}")
    if method is not None:
        raise InvalidRequest.field(field, scheme, f"must be none: the base is quantised ({method})")
    if device.type != "cpu" and has_experts:
        why = "is served on CPUs only for mixtures of experts, whose codes no kernel reads on GPUs"
        raise Unsupported.field(field, scheme, why)
