"""Rotary position embedding and its scaling methods.

Sources: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); Ding et al. 2024 (LongRoPE);
frequencies and factors as Hugging Face transformers computes them, so that tokens match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from loraplex_services.worker.transfers import copy_into
from loraplex_services.worker.types.model_config import RopeConfig

CosSin = tuple[Tensor, Tensor]
"""Cosines and sines of each token, `[T, 1, dim / 2]` each, in the model's dtype."""

Rotate = Callable[[Tensor, CosSin, int], Tensor]
"""(heads side by side `[T, heads * D]`, cosines and sines, D) -> rotated; may be in place."""


class Rotary:
    """Rotations of one RopeConfig, and of adapters that bring another in its place: rows of a table
    of frequencies. Row 0 is the config's own, row 1 the same for long sequences."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.dim = config.dim
        self._num_pairs = (config.dim + 1) // 2  # an odd part of the head is rounded up
        self._frequencies = torch.zeros(0, self._num_pairs, device=device)
        self._factors = torch.zeros(0, device=device)
        self.reserve(2)
        self.set(0, config)
        self._base = self._frequencies[0].clone(), float(self._factors[0])

    def reserve(self, num_rows: int) -> None:
        """Allocate rows, before anything uses the table's address."""
        num_new = num_rows - len(self._factors)
        assert num_new >= 0, (num_rows, len(self._factors))
        new_rows = self._frequencies.new_zeros(num_new, self._num_pairs)
        self._frequencies = torch.cat((self._frequencies, new_rows))
        self._factors = torch.cat((self._factors, self._factors.new_zeros(num_new)))

    def set(self, row: int, config: RopeConfig) -> None:
        """Fill `row`, and the next one for long sequences. No step may read them meanwhile."""
        frequencies, factor = _frequencies(config)
        long = _longrope(config, "long_factor") if config.kind == "longrope" else frequencies
        copy_into(self._frequencies[row : row + 2], torch.stack((frequencies, long)))
        self._factors[row : row + 2] = factor

    def cos_sin(self, positions: Tensor, dtype: torch.dtype, rows: Tensor | None = None) -> CosSin:
        """Cosines and sines for int64 positions `[T]`, by rows of the table, int64 `[T]`; None =
        row 0 for all."""
        frequencies, factor = self._base
        own_factor: Tensor | float = factor
        if rows is not None:
            frequencies, own_factor = self._frequencies[rows], self._factors[rows][:, None]
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos() * own_factor, angles.sin() * own_factor
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def rotate(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate pairs (i, i + dim/2) of the leading dim components of `[T, heads, D]`."""
    cos, sin = cos_sin
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, rest), dim=-1)


def rotate_heads(x: Tensor, cos_sin: CosSin, head_dim: int) -> Tensor:
    """`rotate` for heads side by side, `[T, heads * D]`."""
    return rotate(x.view(len(x), -1, head_dim), cos_sin).flatten(1)


def _frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Inverse frequencies float32 `[dim / 2]` and the factor on cosines and sines."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
    plain: Tensor = 1.0 / (config.theta**exponents)
    params = dict(config.params)
    if config.kind == "linear":
        return plain / params["factor"], 1.0
    if config.kind == "llama3":
        return _llama3(plain, params), 1.0
    if config.kind == "yarn":
        return _yarn(config, plain, params), _yarn_factor(params)
    if config.kind == "longrope":
        return _longrope(config, "short_factor"), _longrope_factor(params)
    if config.kind == "proportional":  # pairs that are not rotated have the frequency 0
        is_rotated = torch.arange(len(plain)) < params["num_pairs"]
        return (plain / params.get("factor", 1.0)).where(is_rotated, torch.zeros(())), 1.0
    assert config.kind in ("default", "dynamic"), config.kind
    return plain, 1.0


def _longrope(config: RopeConfig, key: str) -> Tensor:
    """Each frequency divided by a factor of its own."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
    factors = torch.tensor(dict(config.params)[key], dtype=torch.float32)
    frequencies: Tensor = 1.0 / (factors * config.theta**exponents)
    return frequencies


def _longrope_factor(params: Mapping[str, Any]) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    factor, context = params["factor"], params["original_max_position_embeddings"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))


def _llama3(plain: Tensor, params: Mapping[str, Any]) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a ramp in between."""
    factor, context = params["factor"], params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    wavelengths = 2 * math.pi / plain
    scaled = torch.where(wavelengths > context / low, plain / factor, plain)
    ramp = (context / wavelengths - low) / (high - low)
    between = (1 - ramp) * scaled / factor + ramp * scaled
    is_between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(is_between, between, scaled)


def _yarn(config: RopeConfig, plain: Tensor, params: Mapping[str, Any]) -> Tensor:
    """High-frequency dimensions are kept, low ones interpolated, with a ramp in between."""
    context = params["original_max_position_embeddings"]

    def dimension(num_rotations: float) -> float:
        log_ratio = math.log(context / (num_rotations * 2 * math.pi))
        return config.dim * log_ratio / (2 * math.log(config.theta))

    low = dimension(params.get("beta_fast") or 32)
    high = dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(config.dim // 2, dtype=torch.float32)
    ramp: Tensor = ((steps - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    scaled: Tensor = plain / params["factor"]
    return scaled * (1 - kept) + plain * kept


def _yarn_factor(params: Mapping[str, Any]) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if params["factor"] <= 1 else 0.1 * scale * math.log(params["factor"]) + 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return magnitude(params["mscale"]) / magnitude(params["mscale_all_dim"])
    return magnitude(1.0)
