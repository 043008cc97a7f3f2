"""Shared by all readers: stored tensors, and codes that are packed into words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from loraplex.adapter_format.quantisation import Scheme
from loraplex.errors import InvalidRequest
from loraplex_services.worker.ops.linear.coded import CodedWeight


class StoredTensors(Protocol):
    """The tensors of a base's files."""

    def has(self, name: str) -> bool:
        """Whether there is one of this name."""
        ...

    def stored(self, name: str) -> Tensor:
        """The tensor in the type of the file.

        Raises:
            InvalidRequest: there is none.
        """
        ...


class ReadWeight(Protocol):
    """A layout's reader."""

    def __call__(
        self, files: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme
    ) -> CodedWeight:
        """A module's weight `[out, in]`.

        Raises:
            InvalidRequest: a tensor is missing, or does not fit the shape.
        """
        ...


def stored(files: StoredTensors, name: str, *shapes: Sequence[int]) -> Tensor:
    """A tensor of one of several shapes. Raises InvalidRequest if it has another."""
    tensor = files.stored(name)
    if list(tensor.shape) not in [list(shape) for shape in shapes]:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        why = f"config.json and its quantization_config ask for shape {wanted}"
        raise InvalidRequest.field(name, list(tensor.shape), why)
    return tensor


def stored_scales(files: StoredTensors, name: str, *shapes: Sequence[int]) -> Tensor:
    """`stored`, for scales; those of eight bits become float32.

    Raises InvalidRequest if they are not finite floating-point numbers, or all zero.
    """
    scales = stored(files, name, *shapes)
    if not scales.is_floating_point():
        raise InvalidRequest.field(name, str(scales.dtype), "scales must be floating-point numbers")
    scales = scales.float() if scales.element_size() == 1 else scales
    return checked(name, scales)


def checked(name: str, factors: Tensor) -> Tensor:
    """Scales, or a table of values. Some may be zero, such as the scale of a group of zeros.

    Raises InvalidRequest if one is infinite or NaN, or if all are zero.
    """
    if not factors.isfinite().all():
        raise InvalidRequest.field(name, "inf or NaN", "scales and tables must be finite numbers")
    if not factors.any():
        why = "scales and tables must not be zero altogether, as the whole weight would be"
        raise InvalidRequest.field(name, 0, why)
    return factors


def unpacked(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 `[rows, n]` -> uint8 `[rows, n * 32 / bits]`: the codes of each word, lowest first.

    Args:
        order: code number i of a word belongs to position order[i] instead.
    """
    per_word = 32 // bits
    shifts = torch.arange(per_word, dtype=torch.int32, device=words.device) * bits
    codes = ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    if order is not None:
        codes = torch.empty_like(codes).index_copy_(
            2, torch.tensor(order, device=words.device), codes
        )
    return codes.flatten(1)


def number_of_groups(num_inputs: int, group_size: int) -> tuple[int, int]:
    """(groups of a row, inputs of a group); a group size of 0 is a whole row."""
    group_size = group_size or num_inputs
    return -(-num_inputs // group_size), group_size


def signed(codes: Tensor) -> Tensor:
    """uint8 codes of eight bits as int8, 128 less."""
    return (codes ^ 0x80).view(torch.int8)


def column_order(name: str, groups: Tensor, num_groups: int, group_size: int) -> Tensor | None:
    """`CodedWeight.order`: the inputs sorted by their groups; None if they are in order.

    Args:
        groups: the group of each input, `[in]`.

    Raises:
        InvalidRequest: groups differ in size, or do not exist.
    """
    groups = groups.long()
    order = torch.argsort(groups, stable=True)
    ordered = groups[order]
    expected = torch.arange(len(groups), device=groups.device) // group_size
    if not ordered.equal(expected) or int(ordered[-1]) >= num_groups:
        why = f"must give {group_size} inputs to each of {num_groups} groups"
        raise InvalidRequest.field(name, "uneven groups", why)
    is_plain = bool((order[1:] > order[:-1]).all())
    return None if is_plain else order
