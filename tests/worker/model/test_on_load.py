"""What is refused when a base is quantised as it is loaded, by device."""

import pytest
import torch

from loraplex.errors import Unsupported
from loraplex_services.worker.model.on_load import check_on_load

CUDA = torch.device("cuda")


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_gpus_refuse_mixtures_of_experts_by_name(scheme):
    check_on_load(scheme, CUDA, None, has_experts=False)
    check_on_load(scheme, torch.device("cpu"), None, has_experts=True)
    with pytest.raises(Unsupported) as refused:
        check_on_load(scheme, CUDA, None, has_experts=True)
    assert [v.field for v in refused.value.violations] == ["quantization"]
