"""Adapters on quantised bases == transformers + peft over the weights that the codes mean."""

import json

import pytest
from safetensors.torch import load_file, save_file

from loraplex.errors import InvalidRequest, Unsupported
from loraplex.rewriting.into_base import merge_into_base
from loraplex_services.worker.runner.building import build_runner
from tests.worker.loading import adapter_blocks
from tests.worker.parity.adapters import features_of, make_adapter
from tests.worker.parity.bases import LIBRARY_BASES, make_base
from tests.worker.parity.quantised import LAYOUTS, quantised_base, quantised_on_load
from tests.worker.parity.runners import device
from tests.worker.parity.suite import REFUSED, check_mixed_batch, stage_of

FEATURES = (
    "rank-4-attention", "rank-64-all-linear", "rslora", "dora", "patterns", "lm-head", "embedding",
    "bias-all", "saved-tables", "saved-linears", "token-rows", "added-tokens-lora", "experts",
    "expert-linears", "delta-nets-dora",
)  # fmt: skip
THROUGH_LIBRARY = (
    ("minimax-m2", "fp8-blocks"), ("deepseek-v3", "fp8-blocks"), ("hy-v3", "ct-fp8"),
    ("phimoe", "ct-int4-zeros"), ("glm4-moe-lite", "awq"), ("cohere2", "gptq-act-order"),
    ("granite", "ct-int8"), ("olmo2", "bnb-nf4-nested"), ("gemma", "bnb-int8"),
)  # fmt: skip
"""Bases that run through the transformers library, some as they are published."""
SHORT = {
    ("llama", "ct-int8"),
    ("llama", "fp8-tensor"),
    ("qwen3", "gptq-act-order"),
    ("phi3", "gptq-act-order"),
    ("gpt-oss", "ct-int4-zeros"),
    THROUGH_LIBRARY[0],
}
"""Checked in every run; the others are long."""


FAMILIES = (
    "phi3", "mixtral", "qwen3-moe", "qwen2", "llama-yarn-biases", "gemma2", "qwen3.5",
    "qwen3-next", "gemma3-multimodal",
)  # fmt: skip
"""Bases with fused files, experts, tied embeddings, biases, recurrent layers, prefixes of names."""


def _params():
    pairs = [(base, layout) for base in ("llama", "qwen3", "gpt-oss") for layout in LAYOUTS]
    pairs += [(base, layout) for base in FAMILIES for layout in ("gptq-act-order", "ct-fp8")]
    pairs += THROUGH_LIBRARY
    pairs.remove(("qwen3.5", "gptq-act-order"))  # PEFT itself is 2e-4 from its float64 there
    for base, layout in pairs:
        marks = [] if (base, layout) in SHORT else [pytest.mark.long]
        yield pytest.param(base, layout, marks=marks, id=f"{base}-{layout}")


@pytest.mark.parametrize(("base_name", "layout"), list(_params()))
def test_a_mixed_batch_equals_peft_token_for_token(base_name, layout, near_ties, tmp_path):
    base = quantised_base(make_base(base_name, tmp_path / "plain"), layout, tmp_path / "base")
    features = [name for name in FEATURES if name in features_of(base)]
    if base_name in LIBRARY_BASES:
        refused = ("bias-all", "saved-linears", *REFUSED.get(base_name, ()))
        features = [name for name in features if name not in refused]
    stage = stage_of(base, features, tmp_path)
    check_mixed_batch(stage, near_ties, 16)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return quantised_base(make_base("llama", folder / "plain"), "ct-int8", folder / "base")


def test_nothing_is_merged_into_a_quantised_base(base, tmp_path):
    adapter = make_adapter(base, "rank-1", tmp_path / "adapter")
    with pytest.raises(InvalidRequest, match="quantise the result"):
        merge_into_base([(adapter, 1.0)], base.folder, tmp_path / "out")


RANKED = [
    ("llama", "ct-int8", 2),
    *[("llama", layout, 4) for layout in LAYOUTS],
    ("qwen3", "gptq-act-order", 2),
    ("qwen3-moe", "ct-fp8", 2),
    ("qwen3.5", "ct-fp8", 2),
    ("gpt-oss", "ct-int4-zeros", 2),
]
OF_RANKS = (
    "rank-64-all-linear",
    "lm-head",
    "embedding",
    "bias-all",
    "token-rows",
    "expert-linears",
    "dora",
    "dora-tables",
    "saved-linears",
    "delta-nets-dora",
)


@pytest.mark.parametrize(
    ("base_name", "layout", "num_ranks"),
    [pytest.param(*case, marks=[pytest.mark.long] * (i > 0)) for i, case in enumerate(RANKED)],
)
def test_ranks_of_a_quantised_base_equal_peft(base_name, layout, num_ranks, near_ties, tmp_path):
    base = quantised_base(make_base(base_name, tmp_path / "plain"), layout, tmp_path / "base")
    check_ranks(base, tmp_path, near_ties, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("base_name", "scheme"),
    [
        ("llama", "int4"),
        pytest.param("qwen3-moe", "int8", marks=pytest.mark.long),
        pytest.param("llama", "fp8", marks=pytest.mark.long),
    ],
)
def test_ranks_of_a_base_quantised_on_load_equal_peft(base_name, scheme, near_ties, tmp_path):
    meant = quantised_on_load(make_base(base_name, tmp_path / "base"), scheme)
    check_ranks(meant, tmp_path, near_ties, num_ranks=2, quantization=scheme)


def check_ranks(base, folder, near_ties, features=OF_RANKS, **settings):
    """Compare a batch with PEFT."""
    features = [name for name in features if name in features_of(base)]
    stage = stage_of(base, features, folder, **settings)
    try:
        check_mixed_batch(stage, near_ties, 16)
    finally:
        stage.driver.runner.close()


def test_a_plain_file_with_codes_is_refused_by_the_tensor(base, tmp_path):
    config = json.loads((base.folder / "config.json").read_bytes())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(base.folder / "model.safetensors")
    with pytest.raises(InvalidRequest, match="holds codes"):
        build_runner(tmp_path, device="cpu", arena_bytes=8 << 20)


def test_experts_of_gpt_oss_as_linears_are_refused_by_the_missing_tensor(tmp_path):
    base = quantised_base(make_base("gpt-oss", tmp_path / "plain"), "bnb-nf4", tmp_path / "base")
    tensors = load_file(base.folder / "model.safetensors")
    stacked = [name for name in tensors if ".experts." in name]
    for name in stacked:
        for number, expert in enumerate(tensors.pop(name)):
            container, _, projection = name.rpartition(".")
            tensors[f"{container}.{projection}s.{number}.weight"] = expert.contiguous()
    save_file(tensors, base.folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Unsupported, match="serve a copy") as caught:
        build_runner(base.folder, device="cpu", arena_bytes=8 << 20)
    assert caught.value.violations[0].field == "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("base_name", "scheme"),
    [
        ("llama", "int8"),
        pytest.param("llama", "int4", marks=pytest.mark.long),
        pytest.param("llama", "fp8", marks=pytest.mark.long),
        pytest.param("qwen3-moe", "fp8", marks=pytest.mark.long),
        pytest.param("mixtral", "int8", marks=pytest.mark.long),
        pytest.param("qwen2-moe", "int4", marks=pytest.mark.long),
        ("qwen3-moe", "int4"),
        ("qwen2", "int8"),
        pytest.param("llama3-rope-tied", "int4", marks=pytest.mark.long),
        pytest.param("gemma3", "int4", marks=pytest.mark.long),
    ],
)
def test_a_base_quantised_on_load_equals_peft_over_what_its_codes_mean(
    base_name, scheme, near_ties, tmp_path
):
    if device() != "cpu" and base_name != "llama":
        pytest.skip("no kernel of GPUs reads the codes of experts")
    check_on_load(base_name, scheme, near_ties, tmp_path)


def test_experts_are_quantised_on_load_where_no_kernel_reads_their_codes(near_ties, tmp_path):
    if device() != "cpu":
        pytest.skip("GPUs refuse experts")
    check_on_load("qwen3-moe", "int4", near_ties, tmp_path, cpu_isa="torch")


def check_on_load(base_name, scheme, near_ties, folder, **settings):
    """Compare a batch with PEFT over what the codes mean."""
    base = make_base(base_name, folder / "base")
    meant = quantised_on_load(base, scheme)
    features = ["rank-8-all-linear", "dora", "experts"]
    if not base.is_tied:  # PEFT saves the quantised head, too, which would replace the table
        features.append("lm-head")
    features = [name for name in features if name in features_of(meant)]
    stage = stage_of(meant, features, folder, quantization=scheme, **settings)
    check_mixed_batch(stage, near_ties, 16, seed=2)


def test_what_a_base_becomes_on_load_is_part_of_the_arithmetic_and_not_of_the_base(tmp_path):
    base = make_base("llama", tmp_path)
    infos = {
        scheme: build_runner(
            base.folder, device="cpu", arena_bytes=8 << 20, quantization=scheme
        ).model_info()
        for scheme in ("none", "int8", "int4", "fp8")
    }
    assert len({info.numerics_fingerprint for info in infos.values()}) == 4
    assert len({info.geometry.fingerprint for info in infos.values()}) == 1


@pytest.mark.parametrize(
    ("base_name", "changes"),
    [
        ("llama", {"quantization": "fp4"}),
        ("llama", {"quantization": "int8", "model_impl": "transformers"}),
        ("gpt-oss", {"quantization": "int4"}),
        ("quantised", {"quantization": "int8"}),
    ],
)
def test_what_cannot_be_quantised_on_load_is_refused_by_name(base, base_name, changes, tmp_path):
    folder = base.folder if base_name == "quantised" else make_base(base_name, tmp_path).folder
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        build_runner(folder, device="cpu", arena_bytes=8 << 20, **changes)
    assert caught.value.violations[0].field == "quantization"


def test_weights_stay_in_codes_where_a_kernel_reads_them(base, caplog):
    with caplog.at_level("INFO"):
        build_runner(base.folder, device="cpu", arena_bytes=8 << 20)
        build_runner(base.folder, device="cpu", arena_bytes=8 << 20, cpu_isa="torch")
    said = [record.getMessage() for record in caplog.records]
    assert "quantised weights: 12 linears of plain-int8 are kept in codes" in said
    assert any("12 linears of plain-int8 are dequantised" in line for line in said)


def test_experts_stay_in_codes_too(tmp_path, caplog):
    plain = make_base("mixtral", tmp_path / "plain")
    published = quantised_base(plain, "gptq", tmp_path / "base")
    with caplog.at_level("INFO"):
        build_runner(published.folder, device="cpu", arena_bytes=8 << 20)
        build_runner(plain.folder, device="cpu", arena_bytes=8 << 20, quantization="int4")
    said = [record.getMessage() for record in caplog.records]
    # 4 experts of 3 linears in each of 2 layers, and 7 of the 8 linears of attention.
    assert "quantised weights: 31 linears of gptq-int4-g32-asym are kept in codes" in said
    assert "quantised weights: 32 linears of int4-g64 are kept in codes" in said


def test_a_copy_of_the_published_head_under_lora_matrices_takes_no_memory(tmp_path):
    """PEFT writes one alongside LoRA on the head, and for a tied base of the embedding."""
    base = make_base("qwen2", tmp_path / "base")
    adapters = [make_adapter(base, name, tmp_path / name) for name in ("lm-head", "embedding")]
    needed = []
    for scheme in ("none", "int8"):
        runner = build_runner(base.folder, device="cpu", arena_bytes=8 << 20, quantization=scheme)
        needed.append([adapter_blocks(runner, adapter) for adapter in adapters])
    assert needed[0] == needed[1]
