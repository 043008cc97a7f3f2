"""Tables of embeddings: how they are kept, and what is looked up in them."""

import pytest
import torch

from loraplex_services.worker.layers.embedding import TokenTable
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.layers.ranks import OneRank
from tests.worker.native.isas import ISAS, native


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("published", [torch.bfloat16, torch.float16, torch.float32])
def test_a_table_is_kept_in_its_published_type_and_gives_rows_in_the_one_of_the_model(
    isa, published
):
    torch.manual_seed(0)
    weight = torch.randn(12, 8).to(published)
    kept = NativeOperators(native(isa), torch.float32).table(weight.float())
    assert kept.dtype is published
    table = TokenTable(kept, len(kept), OneRank(), torch.float32)
    ids = torch.tensor([3, 0, 3, 11])
    rows = table.look_up(ids)
    assert rows.dtype is torch.float32
    assert rows.equal(weight.float()[ids])
