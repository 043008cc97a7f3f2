"""What is refused, and what stays as published, when a base is quantised as it is loaded."""

import pytest
import torch

from loraplex.errors import Unsupported
from loraplex_services.worker.model.dummy_weights import DummyWeights
from loraplex_services.worker.model.on_load import QuantisedOnLoad, check_on_load

CUDA = torch.device("cuda")


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_gpus_refuse_mixtures_of_experts_by_name(scheme):
    check_on_load(scheme, CUDA, None, has_experts=False)
    check_on_load(scheme, torch.device("cpu"), None, has_experts=True)
    with pytest.raises(Unsupported) as refused:
        check_on_load(scheme, CUDA, None, has_experts=True)
    assert [v.field for v in refused.value.violations] == ["quantization"]


@pytest.mark.parametrize("router", ["mlp.gate", "mlp.shared_expert_gate", "router.proj"])
def test_routers_of_all_families_stay_as_published(router):
    weights = QuantisedOnLoad(DummyWeights(torch.float32, torch.device("cpu")), "int4")
    assert weights.take_codes(f"model.layers.0.{router}.weight", (4, 64)) is None
    assert weights.take_codes("model.layers.0.mlp.gate_proj.weight", (4, 64)) is not None
