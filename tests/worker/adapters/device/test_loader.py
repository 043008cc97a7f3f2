"""AdapterLoader: bytes go where they belong, tables hold views, failures leave no trace."""

import random
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from loraplex.errors import InvalidAdapter
from loraplex_services.worker.adapters.device import base_values
from loraplex_services.worker.adapters.device.base_values import dora_gain, embedding_gain
from loraplex_services.worker.ops.linear.torch import DenseLinear
from loraplex_services.worker.ops.lora.device_records import RecordBuilder
from loraplex_services.worker.ops.lora.site_parts import site_parts
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.types.sites import LINEAR, LM_HEAD
from tests.worker.loading import adapter_blocks, load_adapter
from tests.worker.ops.lora.entering import matrices_of
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base

FEATURES = ["rank-64-all-linear", "dora", "saved-tables", "saved-norms", "token-rows", "embedding"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(base, name, root / name) for name in FEATURES}


@pytest.fixture
def runner(base):
    torch.set_num_threads(1)
    runner = build_runner(base.folder, device="cpu", dtype="float32", arena_bytes=4 << 20)
    runner.arena.data.fill_(0xFF)
    return runner


def scattered(runner, count):
    return random.Random(1).sample(range(runner.arena_blocks), count)


def tiles_of(delta):
    return [*delta.a, *delta.b, *delta.gains, *delta.norm, *delta.rows]


def table_of(runner):
    return runner._adapters.table


@pytest.mark.parametrize("feature", FEATURES)
def test_only_the_given_blocks_are_written(runner, folders, feature):
    blocks = scattered(runner, adapter_blocks(runner, folders[feature]))
    load_adapter(runner, 3, folders[feature], lambda _: blocks)
    others = [b for b in range(runner.arena_blocks) if b not in set(blocks)]
    assert (runner.arena.data[others] == 0xFF).all()
    assert (runner.arena.data[blocks] != 0xFF).any(dim=1).all()


@pytest.mark.parametrize("feature", FEATURES)
def test_tables_hold_views_of_the_arena(runner, folders, feature):
    blocks = scattered(runner, adapter_blocks(runner, folders[feature]))
    load_adapter(runner, 3, folders[feature], lambda _: blocks)
    begin = runner.arena.data.data_ptr()
    tiles = [tile for delta in table_of(runner).values() for tile in tiles_of(delta)]
    assert tiles
    for tile in tiles:
        first, last = tile.data.data_ptr() - begin, tile.data.data_ptr() - begin + tile.data.nbytes
        assert first % 64 == 0
        inside = set(range(first // runner.block_bytes, (last - 1) // runner.block_bytes + 1))
        assert inside <= set(blocks)
        assert not tile.data.isnan().any()


def test_a_damaged_file_enters_nothing(runner, folders, tmp_path):
    for file in folders["dora"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = tmp_path / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.safetensors|cut|[Hh]eader"):
        load_adapter(runner, 0, tmp_path, range)
    assert not table_of(runner)


def test_equal_copies_of_the_base_cost_no_rows(runner, folders):
    """PEFT saves the table under LoRA on the embedding; it is the base's own."""
    assert "base_model.model.model.embed_tokens.base_layer.weight" in load_file(
        folders["embedding"] / "adapter_model.safetensors"
    )
    load_adapter(runner, 0, folders["embedding"], range)
    assert all(delta.row_ids is None for delta in table_of(runner).values())


def test_single_trained_rows_are_kept_alone(runner, folders):
    load_adapter(runner, 0, folders["token-rows"], range)
    found = [d.row_ids.tolist() for d in table_of(runner).values() if d.row_ids is not None]
    assert found == [[3, 7, 200, 299]]


def test_gains_do_not_depend_on_their_chunks(monkeypatch):
    torch.manual_seed(0)
    base = DenseLinear(torch.randn(50, 12))
    a, b, magnitude = torch.randn(3, 12), torch.randn(40, 3), torch.rand(40, 1) + 0.5
    weight_rows = lambda begin, end: base.weight_rows(7 + begin, 7 + end)  # noqa: E731
    complete = dora_gain(weight_rows, a, b, 0.5, magnitude)
    monkeypatch.setattr(base_values, "GAIN_CHUNK_ROWS", 9)
    assert dora_gain(weight_rows, a, b, 0.5, magnitude).equal(complete)
    merged = base.weight_rows(7, 47) + 0.5 * b @ a
    torch.testing.assert_close(complete, magnitude[:, 0] / merged.norm(dim=1))


def test_the_gain_of_an_embedding_is_by_column_and_does_not_depend_on_chunks(monkeypatch):
    torch.manual_seed(0)
    base = DenseLinear(torch.randn(50, 12))
    a, b, magnitude = torch.randn(3, 50), torch.randn(12, 3), torch.rand(12) + 0.5
    complete = embedding_gain(base.weight_rows, a, b, 0.5, magnitude)
    monkeypatch.setattr(base_values, "TABLE_CHUNK_ROWS", 9)
    assert embedding_gain(base.weight_rows, a, b, 0.5, magnitude).equal(complete)
    merged = base.weight_rows(0, 50) + 0.5 * (b @ a).T
    torch.testing.assert_close(complete, magnitude / merged.norm(dim=0))


@pytest.mark.parametrize("feature", [*FEATURES, "int8"])
def test_records_made_at_packing_say_what_the_views_say(base, folders, feature):
    """Kernels on a GPU read the records of the image; here they are made anew from the views."""
    lora_dtype = "int8" if feature == "int8" else "auto"
    runner = build_runner(
        base.folder,
        device="cpu",
        dtype="float32",
        arena_bytes=4 << 20,
        lora_dtype=lora_dtype,
    )
    folder = folders["rank-64-all-linear" if feature == "int8" else feature]
    load_adapter(runner, 3, folder, partial(scattered, runner))
    adapter = table_of(runner).adapter(3)
    sites = runner.layout.sites
    builder = RecordBuilder([part for parts in site_parts(sites) for part in parts])
    for (_, site_id), delta in table_of(runner).items():
        if site_id not in adapter.in_torch:
            builder.add_site(site_id, matrices_of(delta, runner.arena.data.data_ptr()))
    expected, found = builder.build(), adapter.records()
    assert found.sites == expected.sites
    assert (found.index == expected.index).all()
    address = 1 << 40
    moved = found.relocated(adapter.starts, address)
    assert (moved == expected.relocated((0,), address)).all()
    assert adapter.in_torch == {
        site_id
        for (_, site_id), delta in table_of(runner).items()
        if sites.sites[site_id].kind not in (LINEAR, LM_HEAD) or delta.replaces_rows
    }
    assert adapter.trains_norms == any(delta.norm for delta in table_of(runner).values())
