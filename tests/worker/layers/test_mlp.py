"""The activations of a gated MLP."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from loraplex_services.worker.ops.activation.torch import ACTIVATIONS, plain_gate

LEARNT = {"prelu", "xielu"}
"""They have weights, which no gated family saves."""


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_an_activation_is_what_transformers_calls_by_its_name(name: str) -> None:
    x = 4 * torch.randn(5, 600, generator=torch.Generator().manual_seed(0))
    first, second = x.chunk(2, dim=-1)
    torch.testing.assert_close(plain_gate(name)(x), ACT2FN[name](first) * second)


def test_all_but_learnt_and_unused_activations_are_there() -> None:
    assert set(ACT2FN) - set(ACTIVATIONS) == LEARNT | {"laplace", "sqrtsoftplus"}
