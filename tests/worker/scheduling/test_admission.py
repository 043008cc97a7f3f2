"""The peak forecast against a brute-force replay, and adapters with a limit of their own."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.scheduling.admission import peak_kv_blocks
from loraplex_services.worker.types.request import Request
from tests.worker.scheduling.stage import Stage, make_request

LENGTHS = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 30), st.integers(0, 29)), min_size=1, max_size=6
)


def make_requests(lengths: list[tuple[int, int, int]]) -> list[Request]:
    return [
        Request(
            str(index),
            [1] * num_prompt,
            SamplingParams(max_tokens=max_tokens, seed=0),
            output_ids=[2] * min(num_output, max_tokens - 1),
        )
        for index, (num_prompt, max_tokens, num_output) in enumerate(lengths)
    ]


def replayed_peak(requests: list[Request], layout: KvLayout) -> int:
    """All decode in step; each gives its blocks back after its last token."""
    steps = max(r.max_num_tokens - r.num_tokens for r in requests)
    return max(
        sum(
            layout.max_blocks(r.num_tokens + step)
            for r in requests
            if r.num_tokens + step <= r.max_num_tokens
        )
        for step in range(steps + 1)
    )


@given(LENGTHS, st.sampled_from([(None,), (None, None), (None, 8), (4,)]))
def test_the_forecast_is_never_below_what_decoding_together_holds(
    lengths: list[tuple[int, int, int]], windows: tuple[int | None, ...]
) -> None:
    requests, layout = make_requests(lengths), KvLayout(4, windows, 8)
    forecast, replayed = peak_kv_blocks(requests, layout), replayed_peak(requests, layout)
    assert replayed <= forecast <= replayed + len(requests) * len(windows)
    num_tokens = sum(request.max_num_tokens for request in requests)
    assert forecast <= layout.most_blocks(num_tokens, len(requests))


def test_one_request_is_forecast_exactly() -> None:
    [request] = make_requests([(9, 8, 0)])
    assert peak_kv_blocks([request], KvLayout(4, (None,), 8)) == 5


def test_adapters_take_turns_in_their_share_of_the_arena() -> None:
    stage = Stage(adapter_blocks=4)
    stage.fetch("sha256:a", "sha256:b", "sha256:c", "sha256:d")
    names = [f"{number}/{digest}" for number in range(3) for digest in "abcd"]
    stage.submit(*(make_request(name, digests=(f"sha256:{name[-1]}",)) for name in names))
    while stage.scheduler.has_work:
        stage.step()
        assert stage.cache.held_blocks + stage.cache.idle_blocks(()) <= 4
    assert sorted(stage.finished) == sorted(names) and not stage.lost


def test_adapters_of_one_request_that_exceed_their_share_are_refused() -> None:
    stage = Stage(adapter_blocks=4)
    stage.fetch("sha256:a", "sha256:b", "sha256:c")
    stage.submit(make_request("both", digests=("sha256:b", "sha256:c")))
    stage.submit(make_request("fits", digests=("sha256:a", "sha256:c")))
    while stage.scheduler.has_work:
        stage.step()
    assert (stage.finished, stage.reasons) == (["fits"], {"both": "REQUEST_TOO_LARGE"})
