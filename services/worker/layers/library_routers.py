"""Adds adapters to the routers of a model of the transformers library.

A router is no linear there: it computes a product with its weight, and chooses experts by the
result. Its class is left as it is, and the adapters of the batch are added to that product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loraplex_services.worker.layers.library_modules import CurrentPass
from loraplex_services.worker.ops.lora.torch import add_lora


class _OnProducts(TorchFunctionMode):
    """Calls a function after each product that is computed within, with its result and with the
    arguments of `torch.nn.functional.linear`."""

    def __init__(self, then: Callable[..., None]) -> None:
        super().__init__()
        self._then = then

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Part of torch's protocol."""
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            self._then(result, *args, **(kwargs or {}))
        return result


class SiteRouter:
    """The forward pass of a router with the adapters of the batch."""

    def __init__(self, forward: Callable[..., Any], site_id: int, current: CurrentPass) -> None:
        self._forward = forward
        self._site_id = site_id
        self._current = current

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as the library's."""
        assert self._current.lora is not None, "set for each pass"
        if not self._current.lora.runs:
            return self._forward(*args, **kwargs)
        with _OnProducts(self._add):
            return self._forward(*args, **kwargs)

    def _add(self, y: Tensor, x: Tensor, *_weight: Tensor | None) -> None:
        assert self._current.lora is not None, "set for each pass"
        # Both may be float32 next to adapters in half precision.
        add_lora(y.flatten(0, -2), x.flatten(0, -2), self._site_id, self._current.lora)


@contextmanager
def routers_noted(modules: Iterable[nn.Module], num_rows: int) -> Iterator[set[nn.Module]]:
    """Collect those of these modules that, in a pass over a number of rows, multiply all of them by
    their weight once and compute no other product."""
    found: set[nn.Module] = set()
    with ExitStack() as stack:
        candidates = filter(_has_matrix, modules)
        noted = {module: stack.enter_context(_products_noted(module)) for module in candidates}
        yield found
    found |= {module for module, rows in noted.items() if rows == [num_rows]}


def _has_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


@contextmanager
def _products_noted(module: Any) -> Iterator[list[int]]:
    """Note the number of rows of each product; 0 if it is not of the module's weight alone."""
    noted: list[int] = []
    own, forward = module.weight, module.forward

    def note(_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        is_own = weight.shape == own.shape and weight.equal(own.to(weight.dtype))
        noted.append(x.shape[:-1].numel() if is_own and bias is None else 0)

    def noting(*args: Any, **kwargs: Any) -> Any:
        with _OnProducts(note):
            return forward(*args, **kwargs)

    module.forward = noting
    try:
        yield noted
    finally:
        del module.forward
