"""A config.json as transformers 4 wrote it means what transformers 5 makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from loraplex_services.worker.model.families import read_model_config
from tests.worker.parity.base_fields import COMMON
from tests.worker.parity.bases import BASES

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
WITHOUT_OLD = ("gemma4", "gemma4-moe", "gemma4-all")
"""Families that transformers 4 does not know."""
ADDED_LATER = ("layer_types", "dtype", "rope_parameters")
"""Keys that files of transformers 4 lack: its early versions, or all."""


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with `rope_theta`, `rope_scaling` and `torch_dtype`."""
    old = {key: value for key, value in config.items() if key not in ADDED_LATER}
    if RECURRENT in config.get("layer_types", ()):
        old["layer_types"] = config["layer_types"]
    params = config["rope_parameters"]
    if FULL in params:
        old |= {"rope_local_base_freq": params[SLIDING]["rope_theta"], "sliding_window_pattern": 6}
        params = params[FULL]
    scaling = {k: v for k, v in params.items() if k not in ("rope_theta", "partial_rotary_factor")}
    old |= {"rope_theta": params["rope_theta"], "torch_dtype": "float32", "rope_scaling": None}
    if "partial_rotary_factor" in params:
        old["partial_rotary_factor"] = params["partial_rotary_factor"]
    if scaling["rope_type"] != "default":
        kind = scaling.pop("rope_type")
        spelled = {"su": "longrope"}.get(kind, kind)
        key = "type" if kind in ("linear", "dynamic", "longrope") else "rope_type"
        old["rope_scaling"] = {key: spelled, **scaling}
    return old


@pytest.mark.parametrize(
    "name",
    [n for n, (_, own) in BASES.items() if "text_config" not in own and n not in WITHOUT_OLD],
)
def test_old_files_mean_the_same(name: str, tmp_path: Path) -> None:
    class_name, changes = BASES[name]
    config = getattr(transformers, class_name)(**{**COMMON, **changes})
    config.save_pretrained(tmp_path / "new")
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(old_spelling(written)))
    ours = [read_model_config(tmp_path / age)[1] for age in ("new", "old")]
    theirs = [transformers.AutoConfig.from_pretrained(tmp_path / a) for a in ("new", "old")]
    ropes = [{k: v for k, v in c.rope_parameters.items() if k != "type"} for c in theirs]
    assert ropes[0] == ropes[1]
    assert getattr(theirs[0], "layer_types", None) == getattr(theirs[1], "layer_types", None)
    assert ours[0] == ours[1]


UNUSUAL = {
    "one-key-head": ("llama", {"num_key_value_heads": 1}),
    "no-mention-of-key-heads": ("llama", {"num_key_value_heads": None}),
    "no-mention-of-a-head": ("llama", {"tie_word_embeddings": None}),
    "several-ends": ("llama", {"eos_token_id": [310, 7]}),
    "no-end": ("llama", {"eos_token_id": None}),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_a_file_leaves_out_is_what_transformers_takes_it_for(
    case: str, tmp_path: Path
) -> None:
    name, changes = UNUSUAL[case]
    class_name, given = BASES[name]
    config = getattr(transformers, class_name)(**{**COMMON, **given})
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields = {k: v for k, v in {**fields, **changes}.items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    _, ours = read_model_config(tmp_path)
    ends = theirs.eos_token_id
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    listed = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if "eos_token_id" in fields:
        assert list(ours.eos_token_ids) == sorted(listed)
    assert (ours.head_dim, ours.vocab_size) == (theirs.head_dim, theirs.vocab_size)


SCALED = {
    "yarn": {"factor": 2.0},
    "llama3": {"factor": 2.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


FAMILIES = ("llama", "mistral", "qwen2", "mixtral", "qwen2-moe")


@pytest.mark.parametrize("original", [None, 64])
@pytest.mark.parametrize(
    ("name", "kind"), [("phi3", "longrope"), *((n, k) for n in FAMILIES for k in SCALED)]
)
def test_a_context_that_a_file_leaves_out_scales_its_rope_as_in_transformers(
    name: str, kind: str, original: int | None, tmp_path: Path
) -> None:
    class_name, changes = BASES[name]
    own = {**COMMON, **changes, "head_dim": 16}  # Mixtral's null fails with a long rope
    getattr(transformers, class_name)(**own).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["max_position_embeddings"]
    fields["rope_parameters"] = {"rope_type": kind, "rope_theta": 1e4, **SCALED[kind]}
    if original is not None:
        fields["rope_parameters"]["original_max_position_embeddings"] = original
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    params = theirs.rope_parameters
    trained_for = params["original_max_position_embeddings"]
    factor = params.get("factor") or theirs.max_position_embeddings / trained_for
    _, ours = read_model_config(tmp_path)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    found = dict(ours.ropes[0].params)
    assert (found["original_max_position_embeddings"], found["factor"]) == (trained_for, factor)
