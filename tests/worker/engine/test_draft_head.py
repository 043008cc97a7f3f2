"""Drafts that the base's own head proposes: what it computes, and that they change no output."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import peft
import pytest

from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.scheduling import drafts as drafting
from loraplex_services.worker.types.messages import Submit
from loraplex_services.worker.types.step_plan import PlannedRow, SampledRow
from tests.worker.engine.test_drafts import flat, random_request, run
from tests.worker.engine_stage import A, B, Stage, make_runner, submit
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.draft_heads import PlainHead, add_draft_head

Spied = list[tuple[str, list[int], int]]
"""Request, its tokens, and what the head proposed after them."""


def write_files(root: Path, name: str = "qwen3.5") -> TinyBase:
    base = make_base(name, root / "base")
    make_adapter(base, "delta-nets", root / A)
    make_adapter(base, "rank-16-mlp" if name == "qwen3.5" else "experts", root / B)
    return base


def make_rows_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts pay in large steps, and where each row needs experts of its own."""
    monkeypatch.setattr(drafting, "FIXED_ROWS", 1000)
    monkeypatch.setattr(drafting.Drafts, "_time", lambda _, num_rows: 1000.0 + num_rows)


def spy(monkeypatch: pytest.MonkeyPatch) -> Spied:
    """All proposals of the engines that run from now on."""
    seen: Spied = []
    verified = drafting.Drafts.verified

    def noting(self: drafting.Drafts, row: PlannedRow, sampled: SampledRow, now: float) -> None:
        if sampled.proposal is not None:
            request = row.request
            chosen = [sampled.token_id or 0, *(each.token_id or 0 for each in sampled.further)]
            tokens = request.prompt_ids + request.output_ids + chosen
            seen.append((request.request_id, tokens, sampled.proposal))
        verified(self, row, sampled, now)

    monkeypatch.setattr(drafting.Drafts, "verified", noting)
    return seen


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "qwen3-next"])
def test_proposals_are_the_likeliest_tokens_of_a_plain_head(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in chunks, and adapters act on the base's layers only."""
    base = write_files(tmp_path, name)
    tensors = add_draft_head(base.folder)
    seen = spy(monkeypatch)
    make_rows_cheap(monkeypatch)
    stage = Stage(make_runner(tmp_path, 1 << 22), tmp_path, max_step_tokens=24)
    fields = {"num_prompt": 30, "max_tokens": 12, "temperature": 1.0}
    stage.run(*stage.fetched(A), submit("base", **fields), submit("adapted", A, seed=1, **fields))
    heads = {"base": PlainHead(base.model, tensors)}
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path / A).eval()
    heads["adapted"] = PlainHead(model, tensors)
    assert len(seen) > 12 and {request for request, _, _ in seen} == {"base", "adapted"}
    for request, tokens, proposal in seen:
        logits = heads[request].logits(tokens)[-1]
        assert logits.max() - logits[proposal] < 1e-4, (request, len(tokens))


def outputs(
    runner: TorchRunner, files: Path, requests: list[Submit], max_step_tokens: int, drafts: bool
) -> dict[str, object]:
    stage = Stage(runner, files, max_step_tokens=max_step_tokens, drafts=drafts)
    said = run(stage, requests)
    stage.close()
    return {name: flat(own) for name, own in said.items()}


@pytest.mark.parametrize(
    ("name", "num_blocks", "dtype", "num_matched"),
    [
        ("qwen3.5", 200, "bfloat16", 3),
        ("qwen3.5", 36, "float32", 90),
        ("qwen3.5-moe", 36, "bfloat16", 90),
        pytest.param("qwen3.5-moe", 200, "float32", 3, marks=pytest.mark.long),
        pytest.param("qwen3-next", 36, "bfloat16", 90, marks=pytest.mark.long),
    ],
)
def test_proposals_change_no_bit_of_an_output(
    name: str,
    num_blocks: int,
    dtype: str,
    num_matched: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = write_files(tmp_path, name)
    add_draft_head(base.folder, echoes=True)
    seen = spy(monkeypatch)
    make_rows_cheap(monkeypatch)
    monkeypatch.setattr(drafting, "NUM_MATCHED", num_matched)  # if 90, the head makes all drafts
    rng = random.Random(7)
    requests = [random_request(rng, str(i)) for i in range(16)]
    num_bytes = num_blocks * make_runner(tmp_path, dtype=dtype).block_bytes
    drafted, plain = (
        outputs(make_runner(tmp_path, num_bytes, dtype=dtype), tmp_path, requests, 24, drafts)
        for drafts in (True, False)
    )
    assert drafted == plain
    assert len(seen) > 30


def test_a_preempted_request_has_the_same_output_with_proposals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_files(tmp_path)
    add_draft_head(base.folder, echoes=True)
    monkeypatch.setattr(drafting, "NUM_MATCHED", 400)
    fields = {"allowed_token_ids": (1, 2), "logprobs": 1, "temperature": 0.8}
    old = submit("old", num_prompt=10, max_tokens=150, **fields)
    young = submit("young", A, seed=1, num_prompt=320, max_tokens=40, **fields)
    block_bytes = make_runner(tmp_path).block_bytes
    said, num_preemptions = [], []
    for drafts in (True, False):
        runner = make_runner(tmp_path, 32 * block_bytes, max_num_batched_tokens=6)
        stage = Stage(runner, tmp_path, max_step_tokens=6, drafts=drafts)
        outputs = run(stage, [old, young], least=3)
        said.append({name: flat(own) for name, own in outputs.items()})
        num_preemptions.append(stage.engine.scheduler.num_preemptions)
    assert said[0] == said[1]
    assert min(num_preemptions) > 0


def test_a_base_without_a_complete_head_is_served_without_it(tmp_path: Path) -> None:
    base = make_base("qwen3.5", tmp_path / "base")
    assert make_runner(tmp_path).model_info().proposal_cost == 0
    add_draft_head(base.folder)
    assert 0 < make_runner(tmp_path).model_info().proposal_cost < 1
    assert make_runner(tmp_path, overlap="on").model_info().proposal_cost == 0
