"""transformers + peft, one sequence at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import peft
import torch
from torch import Tensor

from tests.worker.parity.adapters import resized
from tests.worker.parity.bases import TinyBase


class Reference:
    """The base and its adapters as PEFT loads them from their folders."""

    def __init__(self, base: TinyBase, adapters: Mapping[str, Path]) -> None:
        self._models: dict[str | None, torch.nn.Module] = {None: base.model}
        for name, folder in adapters.items():
            model = peft.PeftModel.from_pretrained(resized(base, name), str(folder))
            self._models[name] = model.eval()

    @torch.inference_mode()
    def logits(self, adapter: str | None, token_ids: Sequence[int]) -> Tensor:
        """`[tokens, V]` float32."""
        return self._models[adapter](torch.tensor([token_ids])).logits[0]

    @torch.inference_mode()
    def logits64(self, adapter: str | None, token_ids: Sequence[int]) -> Tensor:
        """`[tokens, V]` float64."""
        model = copy.deepcopy(self._models[adapter]).double()
        return model(torch.tensor([token_ids])).logits[0]

    def model(self, adapter: str | None) -> torch.nn.Module:
        """The base, or PEFT's model of an adapter."""
        return self._models[adapter]

    def merged(self, adapter: str) -> torch.nn.Module:
        """The base with the adapter merged into its weights."""
        return copy.deepcopy(self._models[adapter]).merge_and_unload()
