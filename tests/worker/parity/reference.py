"""transformers + peft, one sequence at a time."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import peft
import torch
import transformers
from peft.tuners.lora.variants import calculate_alora_offsets
from torch import Tensor

from tests.worker.parity.adapters import resized
from tests.worker.parity.bases import TinyBase
from tests.worker.parity.near_tie import MAX_GAP

NUM_PERTURBED = 8
ROUNDING = 2.0**-24
"""Half the distance of float32's neighbours, relative."""
_OF_ROUTERS = re.compile(r"\.(router|gate)\.")


class Reference:
    """The base and its adapters as PEFT loads them from their folders."""

    def __init__(self, base: TinyBase, adapters: Mapping[str, Path]) -> None:
        self._models: dict[str | None, torch.nn.Module] = {None: base.model}
        for name, folder in adapters.items():
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Found missing adapter keys")
                model = peft.PeftModel.from_pretrained(resized(base, name), str(folder))
            self._models[name] = model.eval()

    @torch.inference_mode()
    def logits(
        self, adapter: str | None, token_ids: Sequence[int], num_prompt: int | None = None
    ) -> Tensor:
        """`[tokens, V]` float32, as if the tokens after the prompt came one by one."""
        return self.logits_of(self._models[adapter], token_ids, num_prompt)

    @torch.inference_mode()
    def logits64(
        self, adapter: str | None, token_ids: Sequence[int], num_prompt: int | None = None
    ) -> Tensor:
        """The same in float64."""
        model = copy.deepcopy(self._models[adapter]).double()
        return self.logits_of(model, token_ids, num_prompt)

    @torch.inference_mode()
    def rounding_errors(
        self, adapter: str | None, token_ids: Sequence[int], num_prompt: int, chosen: Sequence[int]
    ) -> list[float]:
        """How far the logprobs of `chosen` move, at most, when the weights of a float64 model
        change by as much as float32 rounds them, and those of routers by a near tie: which experts
        they choose is decided by a step, as tokens are."""
        rows = torch.arange(len(chosen)) + num_prompt - 1

        def logprobs(model: torch.nn.Module) -> Tensor:
            found = self.logits_of(model, token_ids, num_prompt).log_softmax(-1)
            return found[rows, torch.tensor(chosen)]

        exact = copy.deepcopy(self._models[adapter]).double()
        expected = logprobs(exact)
        largest = torch.zeros_like(expected)
        for seed in range(NUM_PERTURBED):
            generator = torch.Generator().manual_seed(seed)
            model = copy.deepcopy(exact)
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.mul_(1 + (MAX_GAP if _OF_ROUTERS.search(name) else ROUNDING) * noise)
            largest = torch.maximum(largest, (logprobs(model) - expected).abs())
        return largest.tolist()

    def logits_of(
        self, model: torch.nn.Module, token_ids: Sequence[int], num_prompt: int | None
    ) -> Tensor:
        """The same of a model that is none of these."""
        complete = model(
            torch.tensor([token_ids]), **_offsets(model, token_ids, num_prompt)
        ).logits[0]
        switch_len = _switch_len(model.config)
        is_switching = num_prompt is not None and switch_len and num_prompt <= switch_len
        if not is_switching or len(token_ids) <= switch_len:
            return complete
        first = token_ids[:switch_len]
        short = model(torch.tensor([first]), **_offsets(model, first, num_prompt)).logits[0]
        return torch.cat((short, complete[switch_len:]))

    @property
    def names(self) -> list[str | None]:
        """Adapters, and None for the base."""
        return list(self._models)

    def model(self, adapter: str | None) -> torch.nn.Module:
        """The base, or PEFT's model of an adapter."""
        return self._models[adapter]

    def merged(self, adapter: str) -> torch.nn.Module:
        """The base with the adapter merged into its weights."""
        return copy.deepcopy(self._models[adapter]).merge_and_unload()


def _switch_len(config: transformers.PretrainedConfig) -> int | None:
    """Sequences of more tokens have the long factors of LongRoPE, from their first token on."""
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # of all layers, or by the type of layer
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
    return None


def _offsets(
    model: torch.nn.Module, token_ids: Sequence[int], num_prompt: int | None
) -> dict[str, list[int | None]]:
    """Where PEFT's `generate` lets an activated LoRA begin, counted from the end: it looks at the
    prompt alone."""
    configs = getattr(model, "peft_config", {})
    tokens = getattr(configs.get("default"), "alora_invocation_tokens", None)
    if not tokens:
        return {}
    prompt = torch.tensor([token_ids[:num_prompt]])
    (offset,) = calculate_alora_offsets(configs, "default", prompt)
    num_after = len(token_ids) - prompt.shape[1]
    return {"alora_offsets": [None if offset is None else offset + num_after]}
