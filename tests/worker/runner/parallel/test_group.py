"""Ranks on a tiny base: what they send each other, what each holds, and how they end."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import torch

from loraplex.errors import InvalidAdapter, InvalidRequest, LoraplexError, Unsupported
from loraplex_services.worker.adapters.pack.image import ImageFile, image_path
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.parallel.collectives import TorchRanks
from loraplex_services.worker.runner.parallel.group import check_group
from loraplex_services.worker.runner.parallel.messages import RankLost, RankReady, check_equal
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.sharding import padded_share
from tests.worker import tiny
from tests.worker.loading import in_blocks
from tests.worker.parity.driving import Driver, Job, greedy

PATIENCE_S = 60.0
FLOAT_BYTES = 4
PAIR_BYTES = 8
"""Of a score and a token."""
ALL_LINEAR = tuple(name.split(".")[1] for name in tiny.LINEARS)
READY = RankReady(
    config="config",
    weights="weights",
    dtype="float32",
    arithmetic="abc",
    num_blocks=8,
    block_bytes=1024,
)


@dataclass
class Group:
    """A runner of several ranks, and who of the other ranks has ended."""

    root: Path
    settings: dict[str, object] = field(default_factory=dict)
    num_ranks: int = 2
    num_adapters: int = 0
    ended: list[tuple[int, int]] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)
    runner: TorchRunner = field(init=False)

    def __post_init__(self) -> None:
        tiny.write_base(self.root / "base")
        self.runner = build_runner(
            self.root / "base",
            device="cpu",
            arena_bytes=1 << 20,
            num_ranks=self.num_ranks,
            **{"dtype": "float32", **self.settings},
            on_rank_end=self.note_end,
        )

    def note_end(self, rank: int, code: int) -> None:
        self.ended.append((rank, code))
        self.has_ended.set()

    def adapter(self, name: str, rank: int, targets: tuple[str, ...] = ALL_LINEAR) -> Path:
        self.num_adapters += 1
        folder = self.root / f"{name}-{self.num_adapters}"
        return tiny.write_adapter(folder, seed=rank, rank=rank, targets=targets)


@contextmanager
def running(root: Path, settings: dict[str, object], num_ranks: int) -> Iterator[Group]:
    """Ranks that run until the end of the block: closing ends all, which is no loss."""
    group = Group(root, settings, num_ranks)
    processes = [follower.process for follower in group.runner._followers._all]
    yield group
    assert not group.ended
    group.runner.close()
    assert all(process.wait(PATIENCE_S) is not None for process in processes)
    assert len(processes) == num_ranks - 1 and not group.ended


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Ranks that outlive each test."""
    with running(tmp_path_factory.mktemp("group"), {}, 2) as group:
        yield group


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def full(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    """Ranks that divide both matrices of each pair, and outlive each test."""
    settings = {"fully_sharded_loras": True}
    with running(tmp_path_factory.mktemp("full"), settings, request.param) as group:
        yield group


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def by_site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    """Ranks that may load adapters so large that both matrices are divided at q, k, v and at gate,
    up, but one at o and down. They outlive each test."""
    settings = {"max_lora_rank": 1 << 16}
    with running(tmp_path_factory.mktemp("by-site"), settings, request.param) as group:
        yield group


def held_bytes(group: Group, folder: Path) -> list[int]:
    """Of the adapter's matrices, by rank."""
    found = []
    for layout in group.runner.layout.ranks:
        with ImageFile(image_path(folder, layout.fingerprint)) as image:
            tiles = [t for site in image.index.sites for role in site.roles for t in role.tiles]
            num_items = sum((t[1] - t[0]) * (t[3] - t[2]) for t in tiles)
            assert image.index.num_pages <= group.runner.pack_adapter(folder).result()
            found.append(num_items * FLOAT_BYTES)
    return found


def sent_bytes(
    group: Group, num_tokens: int, slots: tuple[tuple[int, float], ...] = (), **sampling: object
) -> float:
    """By rank 0, for a step of that many prompt tokens, after which a token is chosen."""
    assert isinstance(group.runner._ranks, TorchRanks)
    traffic = group.runner._ranks.traffic
    before = traffic.sent_bytes
    request = greedy("r", range(2, 2 + num_tokens), 1, **sampling)
    Driver(group.runner).run([Job(request, slots)])
    return traffic.sent_bytes - before


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.long), 7])
def test_a_step_sends_two_sums_a_layer_and_adapters_send_nothing(group, num_tokens):
    """N = 2: a sum of B x h sends 2 (N - 1) B h / N numbers, the gather of the best of a row N - 1
    pairs of numbers."""
    sums = 2 * tiny.NUM_LAYERS + 1  # and one for the embedding
    num_rows = (sums - 1) * num_tokens + 1  # the last MLP computes the row that is read
    expected = num_rows * 2 * 1 / 2 * tiny.HIDDEN * FLOAT_BYTES + 1 * PAIR_BYTES
    assert sent_bytes(group, num_tokens) == expected
    driver = Driver(group.runner)
    driver.load(3, group.adapter("all", 8))
    assert sent_bytes(group, num_tokens, ((3, 1.0),)) == expected
    group.runner.unload_adapter(3)


@pytest.mark.parametrize(
    ("sampling", "is_gathered"),
    [
        ({"temperature": 0.8}, False),
        ({"temperature": 0.8, "top_p": 0.9}, True),
        ({"logprobs": 0}, True),
    ],
    ids=str,
)
def test_logits_are_gathered_of_rows_that_need_them(group, sampling, is_gathered):
    best = sent_bytes(group, 4)
    logit_bytes = 1 * padded_share(tiny.VOCAB, 2) * FLOAT_BYTES
    expected = best - 1 * PAIR_BYTES + logit_bytes if is_gathered else best
    assert sent_bytes(group, 4, **sampling) == expected


def test_all_ranks_compute_all_rows_where_a_prompt_is_read(group):
    num_rows = (2 * tiny.NUM_LAYERS + 1) * 4
    logit_bytes = 3 * padded_share(tiny.VOCAB, 2) * FLOAT_BYTES
    expected = num_rows * tiny.HIDDEN * FLOAT_BYTES + logit_bytes + 1 * PAIR_BYTES
    assert sent_bytes(group, 4, prompt_logprobs=0) == expected


def test_ranks_gather_logits_in_the_dtype_that_all_of_them_compute(tmp_path):
    with running(tmp_path, {"dtype": "bfloat16"}, 2) as group:
        best = sent_bytes(group, 4)
        logit_bytes = 1 * padded_share(tiny.VOCAB, 2) * torch.bfloat16.itemsize
        assert sent_bytes(group, 4, logprobs=0) == best - 1 * PAIR_BYTES + logit_bytes


def test_each_rank_holds_the_share_of_an_adapter_that_the_partition_says(group):
    """A of column sites and B of row sites are whole on both, everything else is halved."""
    rank, folder = 16, group.adapter("all", 16)
    group.runner.pack_adapter(folder).result()
    shared = halved = 0
    for name, (num_outputs, num_inputs) in tiny.LINEARS.items():
        is_row = name in ("self_attn.o_proj", "mlp.down_proj")
        shared += rank * (num_outputs if is_row else num_inputs)
        halved += rank * (num_inputs if is_row else num_outputs)
    expected = tiny.NUM_LAYERS * (shared + halved // 2) * FLOAT_BYTES
    assert held_bytes(group, folder) == [expected] * 2


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("targets", "factor"), [(("q_proj",), 1), (("o_proj",), 2), (QKVO, 5), (ALL_LINEAR, 9)]
)
@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.long), 7])
def test_divided_pairs_send_what_the_paper_says(full, num_tokens, targets, factor):
    """S-LoRA, section 6.2: 5 (N - 1) B r / N numbers a layer for q, k, v, o, 9 for all seven."""
    ranks = (4, 8)
    driver, base = Driver(full.runner), sent_bytes(full, num_tokens)
    for slot, rank in enumerate(ranks):
        driver.load(slot, full.adapter(f"rank-{rank}", rank, targets))
    for slot, rank in enumerate(ranks):
        sent = sent_bytes(full, num_tokens, ((slot, 1.0),)) - base
        full.runner.unload_adapter(slot)
        others = full.num_ranks - 1
        num_rows = tiny.NUM_LAYERS * factor * num_tokens
        if targets is ALL_LINEAR:  # the last MLP computes the row that is read
            num_rows -= 4 * (num_tokens - 1)
        expected = others * num_rows * rank / full.num_ranks
        assert sent == expected * FLOAT_BYTES


@pytest.mark.parametrize(
    ("targets", "factor"), [(("v_proj",), 1), (("o_proj", "down_proj"), 0), (ALL_LINEAR, 5)]
)
def test_each_site_sends_what_its_own_division_does(by_site, targets, factor):
    driver, base = Driver(by_site.runner), sent_bytes(by_site, 7)
    driver.load(1, by_site.adapter("mixed", 8, targets))
    sent = sent_bytes(by_site, 7, ((1, 1.0),)) - base
    by_site.runner.unload_adapter(1)
    others = by_site.num_ranks - 1
    num_rows = tiny.NUM_LAYERS * factor * 7
    if targets is ALL_LINEAR:  # the last MLP computes the row that is read
        num_rows -= 2 * 6
    expected = num_rows * others * 8 / by_site.num_ranks
    assert sent == expected * FLOAT_BYTES


def test_an_image_says_how_its_sites_are_divided(group, full, by_site):
    layouts = [each.runner.layout for each in (group, full, by_site)]
    shards = [replace(layout, shard=layouts[0].shard) for layout in layouts]
    assert len({layout.fingerprint for layout in shards}) == 3
    arithmetic = {each.runner.model_info().numerics_fingerprint for each in (group, full, by_site)}
    assert len(arithmetic) == 3


def test_divided_pairs_leave_each_rank_its_share_of_an_adapter(full):
    """1/N, but of B of k and v 1/2, because there are two key-value heads."""
    rank, folder = 16, full.adapter("all", 16)
    full.runner.pack_adapter(folder).result()
    num_numbers = 0.0
    for name, (num_outputs, num_inputs) in tiny.LINEARS.items():
        is_kv = name in ("self_attn.k_proj", "self_attn.v_proj")
        num_parts = min(full.num_ranks, 2) if is_kv else full.num_ranks
        num_numbers += rank * (num_inputs / full.num_ranks + num_outputs / num_parts)
    expected = tiny.NUM_LAYERS * num_numbers * FLOAT_BYTES
    assert held_bytes(full, folder) == [expected] * full.num_ranks


def test_a_rank_that_is_killed_is_reported_and_the_next_step_fails(tmp_path):
    mortal = Group(tmp_path)
    [follower] = mortal.runner._followers._all
    os.kill(follower.process.pid, signal.SIGKILL)
    assert mortal.has_ended.wait(PATIENCE_S)
    assert mortal.ended == [(1, -signal.SIGKILL)]
    with pytest.raises(RankLost):
        sent_bytes(mortal, 4)
    mortal.runner.close()


def test_an_image_that_one_rank_cannot_read_fails_the_load_and_not_the_group(group):
    folder = group.adapter("one", 4)
    driver = Driver(group.runner)
    num_pages = group.runner.pack_adapter(folder).result()
    image_path(folder, group.runner.layout.ranks[1].fingerprint).unlink()
    extents = in_blocks(group.runner, num_pages, range(group.runner.arena_blocks))
    copied = group.runner.copy_adapter(folder, extents).result(PATIENCE_S)
    with pytest.raises(LoraplexError) as caught:
        group.runner.enter_adapter(1, copied)
    assert caught.value.reason == "ADAPTER_LOAD_FAILED"
    driver.load(2, folder)  # packed anew
    assert sent_bytes(group, 4, ((2, 1.0),)) > 0
    assert not group.ended


def test_an_image_that_rank_0_cannot_read_fails_the_load_and_not_the_group(group):
    folder = group.adapter("own", 4)
    num_pages = group.runner.pack_adapter(folder).result()
    image_path(folder, group.runner.layout.ranks[0].fingerprint).unlink()
    extents = in_blocks(group.runner, num_pages, range(group.runner.arena_blocks))
    with pytest.raises(FileNotFoundError):
        group.runner.copy_adapter(folder, extents).result(PATIENCE_S)
    assert sent_bytes(group, 4) > 0 and not group.ended


def test_an_adapter_that_validation_refuses_is_refused_as_with_one_rank(group):
    folder = group.adapter("bad", 4)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    with pytest.raises(InvalidAdapter):
        group.runner.pack_adapter(folder).result(PATIENCE_S)


def test_ranks_that_end_before_they_join_fail_the_start(tmp_path, monkeypatch):
    base = tiny.write_base(tmp_path / "base")
    monkeypatch.setattr("loraplex_services.worker.types.nodes.RANK_MODULE", "compileall")
    with pytest.raises(RankLost, match="rank 1 ended with exit code"):
        build_runner(base, device="cpu", arena_bytes=1 << 20, num_ranks=2)


@pytest.mark.parametrize("name", READY.__struct_fields__)
def test_ranks_that_differ_are_refused_by_the_field(name):
    check_equal(READY, READY, 1)
    other = 9 if isinstance(getattr(READY, name), int) else "other"
    with pytest.raises(InvalidRequest, match="rank 3 has") as caught:
        check_equal(READY, msgspec.structs.replace(READY, **{name: other}), 3)
    assert caught.value.violations[0].field == f"tensor_parallel:{name}"


def test_a_base_that_three_ranks_cannot_share_is_refused_before_any_starts(tmp_path):
    base = tiny.write_base(tmp_path / "base")
    with pytest.raises(Unsupported, match=r"num_attention_heads.*--tensor-parallel"):
        build_runner(base, device="cpu", arena_bytes=1 << 20, num_ranks=3)


def test_more_ranks_than_cuda_devices_are_refused(tmp_path, monkeypatch):
    base = tiny.write_base(tmp_path / "base")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidRequest, match="this machine has 1 CUDA devices"):
        check_group(base, "auto", torch.device("cuda"), 4, 2)


@pytest.mark.long
def test_random_weights_give_the_same_tokens_on_two_ranks(tmp_path):
    base = tiny.write_base(tmp_path / "base")
    (base / "model.safetensors").unlink()
    outputs = []
    for num_ranks in (1, 2):
        runner = build_runner(
            base,
            device="cpu",
            dtype="float32",
            arena_bytes=1 << 20,
            load_format="dummy",
            num_ranks=num_ranks,
        )
        outputs += Driver(runner).run([Job(greedy("r", [3, 1, 4, 1, 5], 12))])
        runner.close()
    assert outputs[0] == outputs[1]


def test_ranks_agree_on_the_smallest_arena_that_one_of_them_measures(tmp_path: Path) -> None:
    """Each measures what is free when it has loaded; a group of unequal arenas would not start."""
    base = tiny.write_base(tmp_path / "base")
    runner = build_runner(base, device="cpu", arena_bytes=0, arena_share=0.0005, num_ranks=2)
    try:
        assert runner.arena_blocks >= 2
    finally:
        runner.close()
