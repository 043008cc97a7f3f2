"""Adapters with a vocabulary of their own: what is accepted, and what lacks a part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.adapter_format import File, validate
from loraplex.adapter_format.geometry import Geometry
from loraplex.errors import InvalidAdapter
from tests.adapter_format.builders import HIDDEN, PREFIX, VOCAB, Adapter, Tensor, tiny_geometry

EMBEDDING, HEAD = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"
DELTA = "token_adapter.trainable_tokens_delta"


def table(num_rows: int) -> Tensor:
    return Tensor("F32", (num_rows, HIDDEN))


def rows_of(adapter: Adapter) -> dict[str, int]:
    report = adapter.validate(tiny_geometry())
    return {module.name: module.num_rows for module in report.modules if module.num_rows}


@pytest.mark.parametrize("num_rows", [VOCAB + 3, VOCAB - 2])
def test_both_tables_resized_alike_give_the_adapter_a_vocabulary_of_its_own(num_rows: int) -> None:
    tables = {f"{EMBEDDING}.weight": table(num_rows), f"{HEAD}.weight": table(num_rows)}
    found = rows_of(Adapter().with_tensors(tables))
    assert found == {"model.embed_tokens": num_rows, "lm_head": num_rows}


def test_tables_without_rows_are_refused() -> None:
    """A worker cannot pack them."""
    adapter = Adapter().with_tensors({f"{t}.weight": table(0) for t in (EMBEDDING, HEAD)})
    with pytest.raises(InvalidAdapter, match="has no rows"):
        adapter.validate(tiny_geometry())


def test_tables_of_the_base_s_length_are_no_vocabulary_of_its_own() -> None:
    tables = {f"{EMBEDDING}.weight": table(VOCAB), f"{HEAD}.weight": table(VOCAB)}
    assert rows_of(Adapter().with_tensors(tables)) == {}


def test_added_tokens_trained_as_single_rows_must_leave_no_gap() -> None:
    def adapter(ids: list[int]) -> Adapter:
        rows = Tensor("F32", (len(ids), HIDDEN))
        tensors = {f"{EMBEDDING}.{DELTA}": rows, f"{HEAD}.{DELTA}": rows}
        trained = {"embed_tokens": ids, "lm_head": ids}
        return Adapter().with_config(trainable_token_indices=trained).with_tensors(tensors)

    sizes = rows_of(adapter([VOCAB + 1, 3, VOCAB]))
    assert sizes == {"model.embed_tokens": VOCAB + 2, "lm_head": VOCAB + 2}
    with pytest.raises(InvalidAdapter, match="rows are missing"):
        adapter([3, VOCAB + 1]).validate(tiny_geometry())


def test_a_list_of_trained_tokens_is_of_the_embedding_whatever_its_name() -> None:
    """PEFT reads it so: GPT-2's is `wte`."""
    tiny = tiny_geometry()
    modules = (replace(m, name=m.name.replace("embed_tokens", "wte")) for m in tiny.modules)
    rows = {f"{PREFIX}model.wte.{DELTA}": Tensor("F32", (2, HIDDEN))}
    adapter = Adapter().with_config(trainable_token_indices=[3, 5]).with_tensors(rows)
    report = adapter.validate(replace(tiny, modules=tuple(modules)))
    assert [(m.name, m.token_ids) for m in report.modules if m.token_ids] == [("model.wte", (3, 5))]


def test_the_copies_that_peft_adds_to_saved_tables_are_understood() -> None:
    names = ("weight", "modules_to_save.weight", "original_module.weight")
    tables = {f"{path}.{name}": table(VOCAB + 3) for path in (EMBEDDING, HEAD) for name in names}
    adapter = Adapter().with_tensors(tables)
    saved = adapter.with_config(modules_to_save=["embed_tokens", "lm_head"])
    assert rows_of(saved) == {"model.embed_tokens": VOCAB + 3, "lm_head": VOCAB + 3}
    with pytest.raises(InvalidAdapter) as caught:
        adapter.validate(tiny_geometry())
    assert len(caught.value.violations) == 4
    assert "when modules_to_save has embeddings" in caught.value.violations[0].description


def test_rows_trained_on_a_resized_table_are_read_with_the_table() -> None:
    tables = {
        f"{EMBEDDING}.token_adapter.base_layer.weight": table(VOCAB + 3),
        f"{EMBEDDING}.{DELTA}": table(2),
        f"{HEAD}.weight": table(VOCAB + 3),
    }
    adapter = Adapter().with_config(trainable_token_indices=[3, VOCAB + 2]).with_tensors(tables)
    assert rows_of(adapter) == {"model.embed_tokens": VOCAB + 3, "lm_head": VOCAB + 3}


def test_whole_tables_and_rows_are_understood_without_a_base() -> None:
    tables = {f"{path}.weight": table(VOCAB + 3) for path in (EMBEDDING, HEAD)}
    Adapter().with_tensors(tables).validate(None)
    rows = Adapter().with_config(trainable_token_indices=[3, 7])
    rows.with_tensors({f"{EMBEDDING}.{DELTA}": table(2)}).validate(None)


def test_an_embedding_resized_without_its_head_is_refused() -> None:
    adapter = Adapter().with_tensors({f"{EMBEDDING}.weight": table(VOCAB + 3)})
    with pytest.raises(InvalidAdapter) as caught:
        adapter.validate(tiny_geometry())
    (violation,) = caught.value.violations
    assert violation.field == f"adapter_model.safetensors:{EMBEDDING}.weight"
    assert "save_embedding_layers" in violation.description


@pytest.mark.parametrize(("name", "num_warnings"), [("tokenizer.json", 0), ("README.md", 1)])
def test_added_tokens_without_a_tokenizer_warn(name: str, num_warnings: int) -> None:
    tables = {f"{path}.weight": table(VOCAB + 3) for path in (EMBEDDING, HEAD)}
    adapter = Adapter().with_tensors(tables)
    sizes = {
        "adapter_config.json": len(adapter.config),
        "adapter_model.safetensors": len(adapter.tensors),
        name: 1,
    }
    files = [File(path, size, "0" * 64) for path, size in sizes.items()]
    size = len(adapter.tensors)
    report = validate(adapter.config, adapter.tensors, size, files, tiny_geometry())
    found = [w for w in report.warnings if "save the tokenizer with" in w.description]
    assert len(found) == num_warnings


def with_head_bias(*, tied: bool) -> Geometry:
    tiny = tiny_geometry()
    modules = (replace(m, has_bias=True) if m.name == "lm_head" else m for m in tiny.modules)
    return replace(tiny, modules=tuple(modules), tied_embeddings=tied)


def test_a_head_that_is_saved_with_its_lora_may_have_a_bias() -> None:
    tensors = {
        f"{HEAD}.base_layer.weight": table(VOCAB),
        f"{HEAD}.base_layer.bias": Tensor("F32", (VOCAB,)),
        f"{HEAD}.lora_A.weight": Tensor("F32", (4, HIDDEN)),
        f"{HEAD}.lora_B.weight": Tensor("F32", (VOCAB, 4)),
    }
    targets = ["q_proj", "v_proj", "lm_head"]
    adapter = Adapter().with_config(target_modules=targets).with_tensors(tensors)
    report = adapter.validate(with_head_bias(tied=False))
    assert "lm_head" in {module.name for module in report.modules}


def test_tokens_trained_for_a_shared_head_with_a_bias_are_refused() -> None:
    """PEFT computes such a head without its bias."""
    rows = {f"{EMBEDDING}.{DELTA}": Tensor("F32", (2, HIDDEN))}
    adapter = Adapter().with_config(trainable_token_indices=[3, 5]).with_tensors(rows)
    adapter.validate(with_head_bias(tied=False))
    with pytest.raises(InvalidAdapter, match="leaves out the head's bias"):
        adapter.validate(with_head_bias(tied=True))
