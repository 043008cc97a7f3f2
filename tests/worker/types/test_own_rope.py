"""Rotary embeddings of adapters that cannot replace those of their base."""

import pytest

from loraplex.adapter_format.rope_scaling import RopeScaling
from loraplex.errors import InvalidAdapter
from loraplex_services.worker.types.model_config import RopeConfig
from loraplex_services.worker.types.own_rope import BaseRopes, own_ropes

YARN = RopeScaling("yarn", params=(("factor", 4.0),))


def base_of(dim: int, theta: float) -> BaseRopes:
    return BaseRopes((RopeConfig(dim, theta, "default", ()),), (True,), 64)


def test_yarn_on_a_base_with_theta_1_is_refused_unless_the_adapter_has_its_own_theta() -> None:
    with pytest.raises(InvalidAdapter, match=r"rope_theta: .* the base's is 1"):
        own_ropes(base_of(16, 1.0), YARN)
    own_ropes(base_of(16, 1.0), RopeScaling("yarn", theta=100.0, params=YARN.params))


def test_yarn_is_refused_on_a_base_that_rotates_an_odd_number_of_components() -> None:
    with pytest.raises(InvalidAdapter, match="rotates 15 components"):
        own_ropes(base_of(15, 10000.0), YARN)
