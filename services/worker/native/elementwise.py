"""Element-wise operations of two operands in one kernel: `lpx_elementwise`."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Any

from torch import Tensor

from loraplex_services.worker.native.library import ACTIVATION_DTYPES, DTYPE_CODES

Dimension = tuple[int, tuple[int, ...]]
"""A size, and the stride of each tensor."""


class Operation(IntEnum):
    """A function of a and b. Results of COPY, ADD and MULTIPLY have the bits of torch's."""

    COPY = 0
    """a."""
    ADD = 1
    MULTIPLY = 2
    SILU = 3
    """silu(a) * b; in this and the next, the activation is rounded to a's dtype."""
    GELU_TANH = 4
    """gelu(a) * b, by its tanh formula."""
    SIGMOID = 5
    """sigmoid(a) * b."""


def compute(kernels: Any, operation: Operation, y: Tensor, a: Tensor, b: Tensor) -> bool:
    """Write the result to `y`, which has the shape that a and b broadcast to.

    Args:
        kernels: a library, or a recorder of its calls.

    Returns: whether the kernel can; otherwise nothing is written.
    """
    codes = [DTYPE_CODES[x.dtype] if x.dtype in ACTIVATION_DTYPES else -1 for x in (y, a, b)]
    places = _places(y.shape, y.stride(), a.shape, a.stride(), b.shape, b.stride())
    if places is None or not _are_served(operation, *codes):
        return False
    of_y, of_a, of_b, sizes = places
    kernels.lpx_elementwise(
        operation,
        *(y.data_ptr(), codes[0], *of_y[:2]),
        *(a.data_ptr(), codes[1], *of_a),
        *(b.data_ptr(), codes[2], *of_b),
        *sizes,
    )
    return True


def _are_served(operation: Operation, y: int, a: int, b: int) -> bool:
    """Whether the kernel has an operation for these codes of dtypes; -1 = another."""
    if min(y, a, b) < 0:
        return False
    if operation is Operation.COPY:
        return True
    return a == y and (b == y or operation in (Operation.ADD, Operation.MULTIPLY))


@lru_cache(maxsize=1024)
def _places(*shapes_and_strides: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The strides of y, a and b between rows, groups and items, and the sizes of these; None if
    there are more dimensions. Arguments are the shape and the strides of each."""
    shape = shapes_and_strides[0]
    pairs = zip(shapes_and_strides[::2], shapes_and_strides[1::2], strict=True)
    strides = [_broadcast(own, steps, shape) for own, steps in pairs]
    dimensions = _joined(zip(shape, *strides, strict=True))
    if dimensions is None:
        return None
    sizes, by_dimension = zip(*dimensions, strict=True)
    return (*zip(*by_dimension, strict=True), sizes)


def _broadcast(
    shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[int, ...]:
    """The strides of a tensor in the shape that it is broadcast to."""
    own = zip(shape, strides, strict=True)
    found = (0 if size == 1 else stride for size, stride in own)
    return (*(0,) * (len(wanted) - len(shape)), *found)


def _joined(dimensions: Iterable[tuple[int, ...]]) -> list[Dimension] | None:
    """Rows, groups and items: the first dimension, and the others, of which those that lie one
    after another in every tensor become one. None if more than two remain, or if items are neither
    adjacent nor all the same."""
    first, *others = [(size, tuple(strides)) for size, *strides in dimensions] or [(1, ())]
    found: list[Dimension] = []
    for size, strides in others:
        if size == 1:
            continue
        if found and all(a == size * b for a, b in zip(found[-1][1], strides, strict=True)):
            found[-1] = found[-1][0] * size, strides
        else:
            found.append((size, strides))
    single = 1, (1,) * len(first[1])
    if not found or not _are_items(found[-1]):
        found.append(single)
    if len(found) == 1:
        found.insert(0, single)
    return [first, *found] if len(found) == 2 else None


def _are_items(dimension: Dimension) -> bool:
    (of_result, *of_operands) = dimension[1]
    return of_result == 1 and all(stride in (0, 1) for stride in of_operands)
