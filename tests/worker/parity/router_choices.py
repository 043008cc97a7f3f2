"""What the routers of transformers choose."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

_LAYER = re.compile(r"\.layers\.(\d+)\.", re.ASCII)


@torch.inference_mode()
def chosen_by(model: torch.nn.Module, token_ids: Sequence[int], num_layers: int) -> np.ndarray:
    """`[tokens, layers, k]`: what the routers of transformers choose; 0 in dense layers."""
    noted: dict[int, torch.Tensor] = {}

    def noting(layer: int) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
            noted[layer] = outputs[2]

        return hook

    hooks = [
        module.register_forward_hook(noting(int(found[1])))
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Router") and (found := _LAYER.search(f".{name}"))
    ]
    model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    k = next(iter(noted.values())).shape[-1]
    out = np.zeros((len(token_ids), num_layers, k), dtype=np.int64)
    for layer, experts in noted.items():
        out[:, layer] = experts.reshape(len(token_ids), k).numpy()
    return out
