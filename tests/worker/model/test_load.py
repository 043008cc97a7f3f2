"""Loading weights: single and sharded files, strictness, dummy weights, one bad byte at a time."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapter_format import geometry_from_folder
from loraplex.adapter_format.text_model import PLAIN, WRAPPED, plain_names
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model.dummy_weights import DummyWeights
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.model.load import Checkpoint, TensorWindow, take_rows
from tests.worker.parity.bases import make_base

CPU = torch.device("cpu")


def build(folder, weights=None, operators=None):
    family, config = read_model_config(folder)
    weights = weights or Checkpoint(folder, torch.float32, CPU)
    return family.build(config, weights, operators or Operators())


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


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 5}, {"a": "../b.safetensors"}])
def test_an_index_without_names_of_shards_is_refused(weight_map, base, tmp_path):
    (tmp_path / "config.json").write_bytes((base.folder / "config.json").read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidRequest, match="weight_map: must map tensors"):
        build(tmp_path)


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


def tie(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return folder


def test_a_head_that_contradicts_tying_is_refused(copy):
    tensors, save = copy
    with pytest.raises(InvalidRequest, match="tie_word_embeddings"):
        build(tie(save(tensors)))


def test_an_equal_copy_of_a_tied_head_is_accepted(copy):
    tensors, save = copy
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    build(tie(save(tensors)))


def test_a_tied_head_and_its_table_are_compared_by_value_whatever_their_types(copy):
    tensors, save = copy
    operators = Operators()
    operators.keeps_half = True
    table = tensors["model.embed_tokens.weight"].bfloat16()
    tensors |= {"model.embed_tokens.weight": table, "lm_head.weight": table.float()}
    build(tie(save(tensors)), operators=operators)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1 / 3
    with pytest.raises(InvalidRequest, match="tie_word_embeddings"):
        build(tie(save(tensors)), operators=operators)


def test_dummy_weights_need_no_files_and_are_the_same_each_time(base, tmp_path):
    (tmp_path / "config.json").write_bytes((base.folder / "config.json").read_bytes())
    first = build(tmp_path, DummyWeights(torch.float32, CPU))
    second = build(tmp_path, DummyWeights(torch.float32, CPU))
    assert all_weights(first).equal(all_weights(second))
    assert all_weights(first).std() > 0.05


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "qwen3.5", "phi3"])
def test_dummy_weights_serve_experts_states_and_fused_projections(name, tmp_path):
    folder = make_base(name, tmp_path).folder
    assert all_weights(build(folder, DummyWeights(torch.float32, CPU))).isfinite().all()


def test_sites_and_their_ranges_cover_every_linear(base):
    sites = build(base.folder).site_weights.table
    assert [site.kind for site in sites.sites].count("linear") == 4 * 2
    site_range = sites.modules["model.layers.1.self_attn.v_proj"]
    site = sites.sites[site_range.site_id]
    assert (site.layer, site.in_features, site.out_features) == (1, 64, 128)
    assert (site_range.out_begin, site_range.out_features) == (96, 32)


def test_a_base_in_pickles_only_is_refused_with_the_way_out(base, tmp_path):
    (tmp_path / "config.json").write_bytes((base.folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for read in (build, geometry_from_folder):
        with pytest.raises(InvalidRequest, match="safetensors") as refused:
            read(tmp_path)
        assert refused.value.violations[0].field == "pytorch_model.bin"


def test_loading_tells_how_far_it_is(base):
    progress = []
    weights = Checkpoint(
        base.folder, torch.float32, CPU, lambda _, *counts: progress.append(counts)
    )
    build(base.folder, weights)
    file_bytes = (base.folder / "model.safetensors").stat().st_size
    assert progress == sorted(progress) and {total for _, total in progress} == {file_bytes}
    assert 0.9 * file_bytes < progress[-1][0] <= file_bytes


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    return make_base("llava", tmp_path_factory.mktemp("multimodal"))


def respelt(folder, tmp_path, spelling):
    """The base with the names of its text model in another spelling."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    names = plain_names(tensors)
    towers = {name: t for name, t in tensors.items() if name not in names.values()}
    text = {}
    for plain, name in names.items():
        module, _, part = plain.rpartition(".")
        text[f"{spelling.of(module)}.{part}"] = tensors[name]
    save_file({**text, **towers}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("spelling", [*WRAPPED, PLAIN])
def test_a_multimodal_base_is_its_text_model_in_every_spelling(
    multimodal, tmp_path, spelling, caplog
):
    folder = respelt(multimodal.folder, tmp_path, spelling)
    with caplog.at_level("INFO"):
        model = build(folder)
    text = multimodal.model.model.language_model
    expected = text.layers[0].self_attn.q_proj.weight
    site_range = model.site_weights.table.modules["model.layers.0.self_attn.q_proj"]
    rows = model.site_weights.linears[site_range.site_id].weight_rows(0, site_range.out_features)
    assert rows.equal(expected)
    (record,) = [r for r in caplog.records if "multimodal" in r.message]
    assert record.num_ignored_tensors > 0


def test_a_multimodal_base_that_lacks_a_tensor_of_its_text_model_is_refused(multimodal, tmp_path):
    folder = respelt(multimodal.folder, tmp_path, WRAPPED[0])
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidRequest, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        build(folder)


def test_a_multimodal_base_without_text_weights_is_refused(multimodal, tmp_path):
    folder = respelt(multimodal.folder, tmp_path, PLAIN)
    tensors = load_file(folder / "model.safetensors")
    towers = {name: t for name, t in tensors.items() if "tower" in name}
    save_file(towers, folder / "model.safetensors")
    with pytest.raises(InvalidRequest, match="none of the text model"):
        read_model_config(folder)


def test_a_multimodal_base_whose_text_model_is_of_an_unknown_family_is_refused(tmp_path):
    config = {"model_type": "llava", "text_config": {"model_type": "gpt_neox"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="mistral") as error:
        read_model_config(tmp_path)
    assert error.value.violations[0].field == "config.json:text_config.model_type"


def test_end_tokens_of_a_multimodal_base_come_from_its_text_config(multimodal):
    assert read_model_config(multimodal.folder)[1].eos_token_ids == (310,)


def test_windows_of_stacked_tensors_are_the_parts_of_the_whole(base):
    weights = Checkpoint(base.folder, torch.float32, CPU)
    prefix = "model.layers.0.self_attn"
    parts = [(f"{prefix}.q_proj.weight", 64), (f"{prefix}.k_proj.weight", 32)]
    complete = take_rows(weights, parts, 64)
    window = TensorWindow([(16, 32), (80, 96)], (8, 24))
    expected = torch.cat([complete[16:32, 8:24], complete[80:96, 8:24]])
    assert take_rows(weights, parts, 64, window=window).equal(expected)
    rows = weights.rows_in_files(parts, 64)
    assert (rows.out_features, rows.in_features) == (96, 64)
    assert rows.weight_rows(60, 70).equal(complete[60:70])
    assert rows.weight_rows(5, 5).shape == (0, 64)


@pytest.mark.parametrize(
    ("published", "kept"),
    [
        ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
        ((torch.float16, torch.float16), torch.float16),
        ((torch.bfloat16, torch.float16), torch.float32),
        ((torch.bfloat16, torch.float32), torch.float32),
    ],
)
def test_matrices_of_one_half_precision_type_stay_so_if_that_is_wanted(published, kept, tmp_path):
    parts = {name: torch.randn(4, 8).to(dtype) for name, dtype in zip("ab", published, strict=True)}
    save_file(parts, tmp_path / "model.safetensors")
    weights = Checkpoint(tmp_path, torch.float32, CPU)
    rows = [(name, 4) for name in parts]
    stack = take_rows(weights, rows, 8, keeps_half=True)
    assert stack.dtype is kept
    wide = take_rows(weights, rows, 8)
    assert wide.dtype is torch.float32
    assert stack.float().equal(wide)


def test_a_window_of_one_tensor_of_all_experts_is_a_part_of_it(tmp_path):
    experts = torch.arange(3 * 8 * 6.0).view(3, 8, 6)
    save_file({"experts": experts}, tmp_path / "model.safetensors")
    weights = Checkpoint(tmp_path, torch.float32, CPU)
    window = TensorWindow([(0, 2), (4, 6)], (1, 4), dim=1)
    own = weights.take("experts", (3, 8, 6), window)
    assert own.equal(torch.cat((experts[:, 0:2, 1:4], experts[:, 4:6, 1:4]), dim=1))


def test_a_window_of_a_tensor_of_another_shape_is_refused_by_name(base):
    weights = Checkpoint(base.folder, torch.float32, CPU)
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(InvalidRequest, match="asks for shape") as caught:
        weights.take(name, (64, 32), TensorWindow([(0, 32)]))
    assert caught.value.violations[0].field == name


def test_random_weights_of_several_ranks_have_no_whole_rows():
    rows = DummyWeights(torch.float32, CPU).rows_in_files([("a", 3), ("b", 4)], 5)
    assert (rows.out_features, rows.in_features) == (7, 5)
    with pytest.raises(Unsupported, match="load_format"):
        rows.weight_rows(0, 1)
