"""Adapters on quantised bases == transformers + peft over the weights that the codes mean."""

import json

import pytest

from loraplex.errors import InvalidRequest, Unsupported
from loraplex.rewriting.into_base import merge_into_base
from loraplex_services.worker.runner.building import build_runner
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.quantised import LAYOUTS, quantised_base
from tests.worker.parity.suite import MAX_LOGPROB_ERROR, judge, make_jobs, stage_of

FEATURES = (
    "rank-4-attention", "rank-64-all-linear", "rslora", "dora", "patterns", "lm-head", "embedding",
    "bias-all", "saved-tables", "saved-linears", "token-rows", "added-tokens-lora",
)  # fmt: skip
SHORT = {("llama", "ct-int8"), ("qwen3", "gptq-act-order"), ("llama", "ct-int4")}
"""Checked in every run; the others are long."""


def _params():
    for base in ("llama", "qwen3"):
        for layout in LAYOUTS:
            marks = [] if (base, layout) in SHORT else [pytest.mark.long]
            yield pytest.param(base, layout, marks=marks, id=f"{base}-{layout}")


@pytest.mark.parametrize(("base_name", "layout"), list(_params()))
def test_a_mixed_batch_equals_peft_token_for_token(base_name, layout, near_ties, tmp_path):
    base = quantised_base(make_base(base_name, tmp_path / "plain"), layout, tmp_path / "base")
    stage = stage_of(base, FEATURES, tmp_path)
    jobs = make_jobs(stage, 1, 16, stagger=True)
    stage.driver.run([job for _, job in jobs], chunk=19, overlaps=True)
    for name, verdict, logprob_error in judge(stage, jobs):
        near_ties.add(verdict)
        assert logprob_error < MAX_LOGPROB_ERROR, name


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return quantised_base(make_base("llama", folder / "plain"), "ct-int8", folder / "base")


def test_nothing_is_merged_into_a_quantised_base(base, tmp_path):
    adapter = make_adapter(base, "rank-1", tmp_path / "adapter")
    with pytest.raises(InvalidRequest, match="quantise the result"):
        merge_into_base([(adapter, 1.0)], base.folder, tmp_path / "out")


def test_ranks_refuse_a_quantised_base_by_name(base):
    with pytest.raises(Unsupported) as caught:
        build_runner(base.folder, device="cpu", num_ranks=2, arena_bytes=8 << 20)
    assert caught.value.violations[0].field == "config.json:quantization_config"


def test_a_plain_file_with_codes_is_refused_by_the_tensor(base, tmp_path):
    config = json.loads((base.folder / "config.json").read_bytes())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(base.folder / "model.safetensors")
    with pytest.raises(InvalidRequest, match="holds codes"):
        build_runner(tmp_path, device="cpu", arena_bytes=8 << 20)
