"""Bases from GGUF files == transformers + peft over the weights that transformers reads."""

import json
import shutil
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraplex.adapter_format.geometry import geometry_from_folder
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.model.formats.gguf_folder import GgufFile, write_folder
from loraplex_services.worker.ops.rope.torch import Rotary
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.server.base_files import GGUF_MODULE, find_model, read_tokenizer
from tests.worker.parity.adapters import features_of
from tests.worker.parity.gguf_files import (
    HEADS,
    MIXTURES,
    finish,
    gguf_base,
    gguf_model,
    write_gguf,
)
from tests.worker.parity.suite import check_mixed_batch, stage_of
from tests.worker.parity.test_quantised import FEATURES, check_ranks

LONGROPE, ONES = gguf.RopeScalingType.LONGROPE, np.ones(4, np.float32)
FACTOR = "llama.rope.scaling.factor"
MIXED = ("qwen3", "Q4_K_M")
SHORT = {("llama", "Q8_0"), MIXED}
"""Checked in every run; the others are long."""


def _params():
    for kind in ("llama", "qwen2", "qwen3"):
        for mixture in MIXTURES:
            marks = [] if (kind, mixture) in SHORT else [pytest.mark.long]
            yield pytest.param(kind, mixture, marks=marks, id=f"{kind}-{mixture}")


@pytest.mark.parametrize(("kind", "mixture"), list(_params()))
def test_a_mixed_batch_equals_peft_token_for_token(kind, mixture, near_ties, tmp_path):
    base = gguf_base(kind, mixture, tmp_path / "gguf", tmp_path / "base")
    features = [name for name in FEATURES if name in features_of(base)]
    if (kind, mixture) in SHORT:
        features = [name for name in features if name in ("rank-4-attention", "dora", "lm-head")]
    stage = stage_of(base, features, tmp_path)
    check_mixed_batch(stage, near_ties, 16)


@pytest.mark.parametrize(
    ("kind", "mixture", "num_ranks"),
    [
        pytest.param(*case, num_ranks, marks=[pytest.mark.long] * (case != MIXED or num_ranks > 2))
        for num_ranks in (2, 4)
        for case in sorted(SHORT)
    ],
)
def test_ranks_equal_peft_token_for_token(kind, mixture, num_ranks, near_ties, tmp_path):
    base = gguf_base(kind, mixture, tmp_path / "gguf", tmp_path / "base")
    features = "rank-64-all-linear", "bias-all", "dora", "saved-linears", "lm-head", "embedding"
    check_ranks(base, tmp_path, near_ties, features, num_ranks=num_ranks)


def written(folder, change=lambda writer: None, mixture="Q8_0"):
    """A file with a tokenizer beside it."""
    (folder / "tokenizer.json").write_text("{}")
    write_gguf(gguf_model("llama"), mixture, folder / "base.gguf", change)
    return folder / "base.gguf"


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (lambda w: w.add_expert_count(8), "llama.expert_count", "8"),
        (lambda w: w.add_rope_scaling_type(LONGROPE), "llama.rope.scaling.type", "longrope"),
        (lambda w: w.add_array(FACTOR, [1, 2]), FACTOR, "[1, 2]"),
        (lambda w: w.add_sliding_window(64), "llama.attention.sliding_window", "64"),
        (lambda w: w.add_uint16("split.count", 3), "split.count", "3"),
        (
            lambda w: w.add_tensor("blk.0.attn_sinks.weight", ONES),
            "blk.0.attn_sinks.weight",
            "null",
        ),
        (lambda w: w.add_tensor("output_norm_2.weight", ONES), "output_norm_2.weight", "null"),
    ],
)
def test_what_may_change_the_arithmetic_is_refused_by_name(change, field, value, tmp_path):
    with pytest.raises(Unsupported) as caught:
        write_folder(written(tmp_path, change), tmp_path / "out")
    [violation] = caught.value.violations
    assert (violation.field, violation.value) == (f"base.gguf:{field}", value)


def test_types_and_architectures_that_are_not_served_are_refused_by_name(tmp_path):
    path = written(tmp_path, mixture="Q5_1")
    with pytest.raises(Unsupported, match="is a type that is not served") as caught:
        write_folder(path, tmp_path / "out")
    assert caught.value.violations[0].value == "Q5_1"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    finish(writer)
    with pytest.raises(Unsupported, match="known: llama, qwen2, qwen3"):
        GgufFile(path)


@pytest.mark.parametrize("kept", [0, 3, 40, 3000, -100])
def test_a_damaged_file_is_refused(kept, tmp_path):
    content = written(tmp_path).read_bytes()
    (tmp_path / "base.gguf").write_bytes(content[:kept])
    with pytest.raises(InvalidRequest, match=r"LORAPLEX_MODEL: is not a readable GGUF file"):
        write_folder(tmp_path / "base.gguf", tmp_path / "out")


@pytest.mark.parametrize("num_heads", [0, 3, 256])
def test_a_number_of_heads_that_does_not_fit_is_named(num_heads, tmp_path):
    key = b"llama.attention.head_count"
    right, wrong = (key + struct.pack("<II", 4, number) for number in (HEADS, num_heads))
    path = written(tmp_path)
    content = path.read_bytes()
    assert content.count(right) == 1
    path.write_bytes(content.replace(right, wrong))
    with pytest.raises(InvalidRequest, match=r"attention\.head_count: .* rows of q_proj"):
        write_folder(path, tmp_path / "out")


@pytest.mark.hostile
def test_a_list_that_claims_more_entries_than_its_file_has_does_not_fill_the_machine(tmp_path):
    def text(value):
        return struct.pack("<Q", len(value)) + value

    endless = text(b"a.b") + struct.pack("<IIQ", 9, 4, 1 << 40)  # a list of uint32
    path = tmp_path / "base.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + endless)
    script = f"import {GGUF_MODULE} as g; g.SPARE_MEMORY_BYTES = 64 << 20; g.main()"
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert "needs more memory" in done.stderr.splitlines()[-1]


def test_llama_3_frequencies_equal_those_of_its_config(tmp_path):
    """Files hold one divisor for each frequency; transformers ignores them."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    model = gguf_model("llama")
    model.config.rope_parameters = scaling
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / scaled).numpy()
    path = written(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    write_folder(path, tmp_path / "out")
    _, config = read_model_config(tmp_path / "out")
    positions = torch.arange(256)
    cos, sin = Rotary(config.ropes[0], torch.device("cpu")).cos_sin(positions, torch.float32)
    angles = positions[:, None].float() * scaled
    assert (scaled < plain / 2).any()
    torch.testing.assert_close(cos[:, 0], angles.cos(), atol=1e-4, rtol=0)
    torch.testing.assert_close(sin[:, 0], angles.sin(), atol=1e-4, rtol=0)


def test_the_geometry_is_the_one_of_the_plain_base_and_the_fingerprint_names_the_types(tmp_path):
    write_folder(written(tmp_path), tmp_path / "out")
    gguf_model("llama").save_pretrained(tmp_path / "plain")
    own, plain = (geometry_from_folder(tmp_path / name) for name in ("out", "plain"))
    assert own.modules == plain.modules
    assert own.rotary_pairs == plain.rotary_pairs
    assert own.fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        # All but v_proj of layer 0, which is plain, and with the head.
        ("Q8_0", {"gguf-Q8_0-int8": 14}),
        ("Q4_K_M", {"gguf-Q4_K-int4": 11, "gguf-Q6_K-int6": 3}),
    ],
)
def test_blocks_stay_in_codes(mixture, expected, tmp_path, caplog):
    write_folder(written(tmp_path, mixture=mixture), tmp_path / "out")
    with caplog.at_level("INFO"):
        build_runner(tmp_path / "out", device="cpu", arena_bytes=8 << 20)
    said = [record.getMessage() for record in caplog.records]
    for scheme, count in expected.items():
        assert f"quantised weights: {count} linears of {scheme} are kept in codes" in said


TEXTS = ("Hello, world!", "  two  spaces", "Grüße, 世界 🙂", "x = 12345\n\n")


def with_tokenizer(writer):
    """A byte-level BPE of a few merges, and a template, as llama.cpp writes those of Llama 3."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=309, initial_alphabet=alphabet)
    trained.train_from_iterator(["Hello, two worlds and spaces! Hello again, worlds."] * 4, trainer)
    vocabulary = sorted(trained.get_vocab(), key=trained.token_to_id)
    merges = json.loads(trained.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*vocabulary, "<s>", "</s>"])
    writer.add_token_types([1] * len(vocabulary) + [3, 3])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(len(vocabulary))
    writer.add_chat_template("{{ messages[0].content }}")
    return trained


@pytest.mark.long
def test_a_file_without_a_tokenizer_next_to_it_has_its_own(tmp_path):
    trained = []
    path = written(tmp_path, lambda writer: trained.append(with_tokenizer(writer)))
    (tmp_path / "tokenizer.json").unlink()
    folder = find_model(str(tmp_path), tmp_path / "cache")
    assert find_model(str(path), tmp_path / "cache") == folder
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert own.encode(text, add_special_tokens=False).ids == trained[0].encode(text).ids
    assert own.token_to_id("</s>") == trained[0].get_vocab_size() + 1
    bundle = read_tokenizer(folder)
    assert bundle.bos_token_id == trained[0].get_vocab_size()
    assert "{{ messages[0].content }}" in str(dict(bundle.files))


def test_a_worker_translates_a_file_once_and_passes_on_why_it_cannot(tmp_path):
    path = written(tmp_path)
    folder = find_model(str(path), tmp_path / "cache")
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert find_model(str(tmp_path), tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidRequest, match="is not a readable GGUF file"):
        find_model(str(tmp_path / "other.gguf"), tmp_path / "cache")
    with pytest.raises(InvalidRequest, match="to serve a GGUF file, name one"):
        find_model(str(tmp_path), tmp_path / "cache")
    assert len([*(tmp_path / "cache" / "models").iterdir()]) == 1


def test_code_for_a_tokenizer_next_to_a_file_is_not_run_whatever_a_terminal_answers(
    tmp_path, monkeypatch
):
    path = written(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    config = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(Unsupported, match="trust_remote_code"):
        write_folder(path, tmp_path / "out")


def test_a_link_to_a_file_is_read_with_the_tokenizer_next_to_the_link(tmp_path):
    """As in the hub's cache, where a snapshot has links to files named after their digests."""
    (tmp_path / "blobs").mkdir()
    path = written(tmp_path)
    path.rename(tmp_path / "blobs" / "0a1b2c")
    path.symlink_to("blobs/0a1b2c")
    for model in (path, tmp_path):
        folder = find_model(str(model), tmp_path / "cache")
        expected = (tmp_path / "tokenizer.json").read_bytes()
        assert (folder / "tokenizer.json").read_bytes() == expected


def test_a_link_to_another_file_of_the_same_size_and_time_is_read_anew(tmp_path):
    """As in images whose files all have the time of their source."""
    path = written(tmp_path)
    folder = find_model(str(path), tmp_path / "cache")
    shutil.copy2(path, tmp_path / "other")
    path.unlink()
    path.symlink_to("other")
    assert find_model(str(path), tmp_path / "cache") != folder
