"""Outputs end where transformers + PEFT end them with the same EOS ids."""

import pytest

from tests.worker.parity.bases import make_base
from tests.worker.parity.own_eos import outputs_of_both

NUM_NEW_TOKENS = 32


@pytest.mark.filterwarnings("ignore")
def test_an_adapters_own_eos_ends_its_output_as_generate_does(tmp_path):
    base = make_base("llama", tmp_path / "base")
    ours, theirs = outputs_of_both(base, tmp_path, NUM_NEW_TOKENS)
    assert ours == theirs
    lengths = {name: len(output) for name, output in ours.items()}
    assert any(len_ < NUM_NEW_TOKENS for name, len_ in lengths.items() if "base" not in name)
