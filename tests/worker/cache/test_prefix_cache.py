"""What is shared, what never is, and what goes first."""

from __future__ import annotations

import pytest

from loraplex.api.request import AdapterSet, KeptPrefix
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import KvLayout, grow_tables, release_tables
from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.types.request import RELEASED_BLOCK, OwnRope, Request

BLOCK = 4


class Stage:
    """A cache, its arena, and requests that compute their whole prompt at once."""

    def __init__(
        self, windows: tuple[int | None, ...] = (None,), num_blocks: int = 40, **options: bool
    ) -> None:
        self.layout = KvLayout(BLOCK, windows, 16)
        self.arena = Arena(num_blocks)
        self.cache = PrefixCache(self.arena, self.layout, "base", **options)
        self.reclaimer = Reclaimer(self.arena)
        self.reclaimer.add(self.cache)

    def start(self, prompt_ids: list[int], **fields: object) -> Request:
        """Admit and compute a prompt."""
        sampling = SamplingParams(8, 0, prompt_logprobs=fields.pop("prompt_logprobs", None))
        request = Request(f"r{id(prompt_ids)}", prompt_ids, sampling, **fields)
        self.cache.share(request, self.cache.match(request))
        request.num_cached = start = request.num_computed
        assert self.reclaimer.reclaim(
            self.layout.missing_blocks(request, request.num_tokens), now=0.0
        )
        grow_tables(self.arena, self.layout, request, request.num_tokens)
        request.num_computed = request.num_tokens
        self.cache.keep(request, start)
        return request

    def end(self, request: Request, now: float = 0.0) -> None:
        self.cache.give_back(request, release_tables(request), now)

    def run(self, prompt_ids: list[int], now: float = 0.0, **fields: object) -> int:
        """Start and end a request; returns how many of its tokens were cached."""
        request = self.start(prompt_ids, **fields)
        self.end(request, now)
        self.cache.check_integrity([])
        return request.num_cached


def test_a_second_request_computes_only_what_differs() -> None:
    stage = Stage()
    assert stage.run([1] * 10) == 0
    assert stage.run([1] * 10 + [2] * 10) == 8
    assert stage.run([1] * 10 + [2] * 10 + [3]) == 20
    assert stage.run([1] * 6 + [2] * 10) == 4


def test_the_last_prompt_token_is_always_computed() -> None:
    stage = Stage()
    stage.run([1] * 8)
    assert stage.run([1] * 8) == 4
    assert stage.run([1] * 9) == 8


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"cache_salt": "s"},
        {"adapters": AdapterSet((("sha256:x", 1.0),))},
        {"adapters": AdapterSet((("sha256:y", 0.5),))},
        {"tenant": "b", "cache_salt": "a"},
    ],
    ids=str,
)
def test_nothing_is_shared_across_tenants_salts_and_adapter_sets(other: dict[str, object]) -> None:
    stage = Stage()
    first = {"tenant": "a", "adapters": AdapterSet((("sha256:y", 1.0),))}
    stage.run([1] * 20, **first)
    assert stage.run([1] * 20, **first) == 16
    assert stage.run([1] * 20, **{**first, **other}) == 0


def test_what_lies_before_an_invocation_is_the_base_s_only_under_the_base_s_rope() -> None:
    stage, activated = Stage(), {"adapters": AdapterSet((("a", 1.0),)), "adapters_from": 18}
    assert stage.run([1] * 20) == 0
    assert stage.run([1] * 20, **activated) == 16
    assert stage.run([1] * 20, rope=OwnRope("yarn", None), **activated) == 0


def test_scored_prompts_match_nothing() -> None:
    stage = Stage()
    stage.run([1] * 20)
    assert stage.run([1] * 20, prompt_logprobs=0) == 0


def test_a_disabled_cache_gives_every_block_back() -> None:
    stage = Stage(enabled=False)
    assert stage.run([1] * 20) == stage.run([1] * 20) == 0
    assert stage.arena.num_free == 40


def test_requests_running_together_end_up_with_the_same_blocks() -> None:
    stage = Stage()
    first, second = stage.start([1] * 9), stage.start([1] * 9 + [2] * 5)
    assert first.block_tables[0][:2] == second.block_tables[0][:2]
    stage.cache.check_integrity([*first.block_tables, *second.block_tables])
    stage.end(first)
    assert stage.cache.num_idle == 0, "the second still reads them"
    stage.end(second)
    assert stage.cache.num_idle == 3


def test_a_block_computed_twice_is_stored_once() -> None:
    stage = Stage()
    twins = [Request(name, [1] * 9, SamplingParams(8, 0)) for name in "ab"]
    for request in twins:
        grow_tables(stage.arena, stage.layout, request, 9)
    for request in twins:
        request.num_computed = 9
        stage.cache.keep(request, 0)
    assert twins[0].block_tables[0][:2] == twins[1].block_tables[0][:2]
    assert stage.arena.num_free == 40 - 2 - 2
    stage.cache.check_integrity([table for r in twins for table in r.block_tables])


def test_the_end_of_the_oldest_sequence_goes_first() -> None:
    stage = Stage()
    stage.run([1] * 13, now=1.0)
    stage.run([2] * 13, now=2.0)
    assert stage.reclaimer.reclaim(40 - 6 + 2, now=3.0)
    assert stage.run([2] * 13, now=4.0) == 12
    assert stage.run([1] * 13, now=5.0) == 4


def test_a_used_block_is_never_given_up() -> None:
    stage = Stage(num_blocks=4)
    request = stage.start([1] * 12)
    assert not stage.reclaimer.reclaim(2, now=9.0)
    stage.end(request)
    assert stage.reclaimer.reclaim(4, now=9.0)


def test_windowed_groups_need_only_what_the_window_sees() -> None:
    stage = Stage((None, 6))
    request = stage.start([1] * 17)
    # The second group's early blocks leave, as a long sequence leaves them behind.
    table = request.block_tables[1]
    stage.cache.give_back(request, table[:2], now=0.0, passed=True)
    table[:2] = [RELEASED_BLOCK] * 2
    stage.end(request)
    assert stage.reclaimer.reclaim(stage.arena.num_free + 2, now=0.0), "those behind go first"
    again = stage.start([1] * 17)
    assert again.num_cached == 16
    assert again.block_tables[1][:2] == [RELEASED_BLOCK] * 2
    stage.end(again)
    assert stage.run([1] * 12 + [2]) == 0, "12 tokens need blocks 1 and 2 of the window"


OLD, NEW, NEWER = (AdapterSet(((f"sha256:{name}", 1.0),)) for name in ("a", "b", "c"))


def test_a_request_may_keep_what_other_adapters_computed() -> None:
    stage = Stage()
    stage.run([1] * 14, adapters=OLD)
    kept = (KeptPrefix(OLD, 14),)
    assert stage.run([1] * 14, adapters=NEW, kept=kept) == 12
    assert stage.run([1] * 14, adapters=NEW) == 0


def test_what_follows_kept_blocks_is_shared_only_behind_the_same_ones() -> None:
    stage = Stage()
    stage.run([1] * 9, adapters=OLD)
    kept = (KeptPrefix(OLD, 8),)
    assert stage.run([1] * 20, adapters=NEW, kept=kept) == 8
    assert stage.run([1] * 20, adapters=NEW, kept=kept) == 16
    assert stage.run([1] * 20, adapters=NEW) == 0
    assert stage.run([1] * 20, adapters=OLD) == 8
    longer = (*kept, KeptPrefix(NEW, 17))
    assert stage.run([1] * 20, adapters=NEWER, kept=longer) == 16
    assert stage.run([1] * 20, adapters=NEWER, kept=(KeptPrefix(OLD, 4),)) == 4


def test_kept_blocks_that_are_gone_are_computed_by_the_request_s_own_adapters() -> None:
    stage = Stage()
    kept = (KeptPrefix(OLD, 12),)
    assert stage.run([1] * 14, adapters=NEW, kept=kept) == 0
    assert stage.run([1] * 14, adapters=NEW) == 12
    assert stage.run([1] * 14, adapters=OLD) == 0
    short = Stage()
    short.run([1] * 5, adapters=OLD)
    request = short.start([1] * 14, adapters=NEW, kept=kept)
    assert request.num_cached == 4
    assert request.kept == (KeptPrefix(OLD, 4),)
    short.end(request)
    assert short.run([1] * 14, adapters=OLD) == 4


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 1}, {"adapters_from": 6}], ids=["logprobs", "activated"]
)
def test_requests_that_compute_everything_keep_nothing(fields: dict[str, int]) -> None:
    stage = Stage()
    stage.run([1] * 14, adapters=OLD)
    request = stage.start([1] * 14, adapters=NEW, kept=(KeptPrefix(OLD, 12),), **fields)
    assert (request.num_cached, request.kept) == (0, ())
    stage.end(request)
    assert stage.run([1] * 14, adapters=OLD) == 12


def test_a_disabled_cache_keeps_nothing() -> None:
    stage = Stage(enabled=False)
    request = stage.start([1] * 14, adapters=NEW, kept=(KeptPrefix(OLD, 12),))
    assert request.num_cached == 0
