"""Heads that predict one more token, added to a tiny base, and a plain reading of what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LIKE_LAYER = 3
"""A layer of the tiny bases with attention, whose shapes the head's layer has."""
HEAD_LAYER = "mtp.layers.0."


def add_draft_head(folder: Path, *, echoes: bool = False) -> dict[str, Tensor]:
    """Add the tensors of a head to a base, and return them.

    Args:
        echoes: it proposes the token that comes next once more. Else its weights are random.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    table = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    prefix = f"{table.removesuffix('embed_tokens.weight')}layers.{LIKE_LAYER}."
    own = {
        f"{HEAD_LAYER}{name.removeprefix(prefix)}": torch.empty_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    hidden = tensors[table].shape[1]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        own[f"mtp.{name}.weight"] = torch.empty(hidden)
    own["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
    for name, tensor in sorted(own.items()):
        deviation = 0.1 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
        tensor.normal_(0.0, deviation, generator=generator)
        if echoes and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    if echoes:
        own["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
        tensors["lm_head.weight"] = tensors[table].clone()
    save_file({**tensors, **own}, path)
    return own


class PlainHead:
    """The same computation over the classes of transformers, without a cache."""

    def __init__(self, model: Any, tensors: dict[str, Tensor]) -> None:
        """`model`: the base, adapted or not."""
        self._model = model
        body = self._body()
        layer = type(body.layers[LIKE_LAYER])(body.config, LIKE_LAYER)
        layer.load_state_dict(_with_stacked_experts(tensors))
        self._layer = layer.eval()
        self._tensors = tensors

    def _body(self) -> Any:
        inner = self._model.get_base_model() if hasattr(self._model, "peft_config") else self._model
        return getattr(inner.model, "language_model", inner.model)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._body().config.rms_norm_eps)
        return scaled * (1 + self._tensors[f"mtp.{name}.weight"])

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """Float32 `[n - 1, vocabulary]`: after each two adjacent tokens, those of the third."""
        body, ids = self._body(), torch.tensor([tokens])
        states = self._model(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        embedded = body.embed_tokens(ids[:, 1:])
        both = (
            self._normed("pre_fc_norm_embedding", embedded),
            self._normed("pre_fc_norm_hidden", states),
        )
        x = torch.cat(both, dim=-1) @ self._tensors["mtp.fc.weight"].T
        num = x.shape[1]
        mask = torch.full((num, num), float("-inf")).triu(1)[None, None]
        rotations = body.rotary_emb(x, torch.arange(num)[None])
        y = self._layer(x, position_embeddings=rotations, attention_mask=mask)
        y = y[0] if isinstance(y, tuple) else y
        head = self._model.get_output_embeddings()
        logits: Tensor = self._normed("norm", y)[0] @ head.weight.T
        return logits


def _with_stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the head's layer, with all experts of a projection in one, as transformers
    has them."""
    found = {k.removeprefix(HEAD_LAYER): v for k, v in tensors.items() if k.startswith(HEAD_LAYER)}
    own = {name: found.pop(name) for name in list(found) if ".experts." in name}
    if own:
        experts = range(1 + max(int(name.split(".")[2]) for name in own))

        def stack(part: str) -> Tensor:
            return torch.stack([own[f"mlp.experts.{each}.{part}_proj.weight"] for each in experts])

        found["mlp.experts.gate_up_proj"] = torch.cat((stack("gate"), stack("up")), dim=1)
        found["mlp.experts.down_proj"] = stack("down")
    return found
