"""Loading weights: single and sharded files, strictness, dummy weights, one bad byte at a time."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapter_format import geometry_from_folder
from loraplex.errors import InvalidRequest
from loraplex_services.worker.layers.operators import TorchOperators
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.model.load import Checkpoint, DummyWeights
from tests.worker.parity.bases import make_base

CPU = torch.device("cpu")


def build(folder, weights=None):
    family, config = read_model_config(folder)
    return family.build(config, weights or Checkpoint(folder, torch.float32, CPU), TorchOperators())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture
def copy(base, tmp_path):
    """The base in files of our own, to be damaged."""
    (tmp_path / "config.json").write_bytes((base.folder / "config.json").read_bytes())
    tensors = load_file(base.folder / "model.safetensors")

    def save(changed):
        save_file({k: v.contiguous() for k, v in changed.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return tensors, save


def all_weights(model):
    return torch.cat(
        [
            base.weight_rows(0, base.out_features).flatten()
            for base in model.site_weights.linears.values()
        ]
    )


def test_sharded_files_hold_the_same_model(base, tmp_path):
    sharded = make_base("llama", tmp_path, shard_bytes=100_000)
    assert len(list(sharded.folder.glob("*.safetensors"))) > 2
    assert all_weights(build(sharded.folder)).equal(all_weights(build(base.folder)))


def test_a_missing_tensor_is_named(copy):
    tensors, save = copy
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(InvalidRequest, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        build(save(tensors))


def test_a_left_over_tensor_is_named(copy):
    tensors, save = copy
    tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    with pytest.raises(InvalidRequest, match=r"model\.layers\.0\.self_attn\.sinks"):
        build(save(tensors))


def test_a_wrong_shape_is_named_with_both_shapes(copy):
    tensors, save = copy
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:8]
    with pytest.raises(InvalidRequest, match=r"k_proj\.weight.*\[32, 64\]"):
        build(save(tensors))


def test_a_truncated_file_is_refused(copy):
    tensors, save = copy
    path = save(tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InvalidRequest, match=r"model\.safetensors"):
        build(path.parent)


def test_a_head_that_contradicts_tying_is_refused(copy):
    tensors, save = copy
    folder = save(tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(InvalidRequest, match="tie_word_embeddings"):
        build(folder)


def test_an_equal_copy_of_a_tied_head_is_accepted(copy):
    tensors, save = copy
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = save(tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    build(folder)


def test_dummy_weights_need_no_files_and_are_the_same_each_time(base, tmp_path):
    (tmp_path / "config.json").write_bytes((base.folder / "config.json").read_bytes())
    first = build(tmp_path, DummyWeights(torch.float32, CPU))
    second = build(tmp_path, DummyWeights(torch.float32, CPU))
    assert all_weights(first).equal(all_weights(second))
    assert all_weights(first).std() > 0.05


def test_sites_and_places_cover_every_linear(base):
    sites = build(base.folder).site_weights.table
    assert [site.kind for site in sites.sites].count("linear") == 4 * 2
    place = sites.places["model.layers.1.self_attn.v_proj"]
    site = sites.sites[place.site_id]
    assert (site.layer, site.in_features, site.out_features) == (1, 64, 128)
    assert (place.out_begin, place.out_features) == (96, 32)


def test_a_base_in_pickles_only_is_refused_with_the_way_out(base, tmp_path):
    (tmp_path / "config.json").write_bytes((base.folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for read in (build, geometry_from_folder):
        with pytest.raises(InvalidRequest, match="safetensors") as refused:
            read(tmp_path)
        assert refused.value.violations[0].field == "pytorch_model.bin"


def test_loading_tells_how_far_it_is(base):
    told = []
    weights = Checkpoint(base.folder, torch.float32, CPU, lambda _, *counts: told.append(counts))
    build(base.folder, weights)
    file_bytes = (base.folder / "model.safetensors").stat().st_size
    assert told == sorted(told) and {total for _, total in told} == {file_bytes}
    assert 0.9 * file_bytes < told[-1][0] <= file_bytes
