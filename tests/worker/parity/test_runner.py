"""What a runner promises beyond tokens: seeds, recomputation, combination, scores, reuse."""

import copy
import random

import peft
import pytest
import torch

from loraplex.api.sampling import SamplingParams
from loraplex.errors import InvalidAdapter, InvalidRequest
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.types.request import Request
from tests.worker.loading import adapter_blocks
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import device, parity_runner

FEATURES = ["rank-4-attention", "rank-8-all-linear", "rslora", "rank-64-all-linear"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(base, name, root / name) for name in FEATURES}


def new_driver(base, folders, **settings):
    settings = {"arena_bytes": 8 << 20, **settings}
    driver = Driver(parity_runner(base.folder, **settings))
    for slot, folder in enumerate(folders.values()):
        driver.load(slot, folder)
    return driver


@pytest.fixture(scope="module")
def driver(base, folders):
    return new_driver(base, folders)


@pytest.fixture(scope="module")
def reference(base, folders):
    return Reference(base, folders)


def seeded_jobs(count, *, stagger):
    rng = random.Random(11)
    jobs = []
    for i in range(count):
        prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
        slots = ((rng.randrange(4), 1.0),) if i % 4 else ()
        params = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": rng.getrandbits(64)}
        arrival = rng.randrange(10)
        request = greedy(f"r{i}", prompt, 12, **params)
        jobs.append(Job(request, slots, arrival if stagger else 0))
    return jobs


def test_seeded_requests_draw_the_same_tokens_alone_and_among_31_others(driver):
    together = driver.run(seeded_jobs(32, stagger=True), chunk=9)
    for job, expected in zip(seeded_jobs(32, stagger=False), together, strict=True):
        assert driver.run([job]) == [expected]
    assert len({tuple(output) for output in together}) == 32


def test_a_request_continues_elsewhere_as_if_nothing_had_happened(driver):
    params = {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "seed": 3}
    prompt = list(range(5, 30))
    (whole,) = driver.run([Job(greedy("whole", prompt, 20, **params), ((1, 1.0),))])
    moved = greedy("moved", prompt, 20, **params)
    moved.output_ids = whole[:7]
    assert driver.run([Job(moved, ((1, 1.0),))], chunk=10) == [whole]


def test_samples_of_one_prompt_differ_by_their_index(driver):
    params = SamplingParams(max_tokens=12, seed=5, temperature=1.0)
    jobs = [Job(Request(str(i), [3, 4], params, sample_index=i)) for i in range(4)]
    assert len({tuple(output) for output in driver.run(jobs)}) == 4


def test_weighted_adapters_in_one_request_equal_pefts_concatenation(driver, base, folders):
    names, weights = ["rank-4-attention", "rank-8-all-linear"], [0.7, -0.4]
    first, second = (str(folders[name]) for name in names)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), first, names[0])
    model.load_adapter(second, names[1])
    model.add_weighted_adapter(names, weights, "both", combination_type="cat")
    model.set_adapter("both")
    prompt = list(range(40, 60))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).topk(5)
    job = Job(greedy("both", prompt, 1, logprobs=5), tuple(zip([0, 1], weights, strict=True)))
    driver.run([job])
    entry = job.samples[-1].logprobs
    assert entry is not None
    assert [token for token, _ in entry.top] == expected.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(expected.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_prompt_scores_equal_the_reference_however_it_is_chunked(driver, reference, chunk):
    prompt = [random.Random(2).randrange(300) for _ in range(30)]
    job = Job(greedy("scored", prompt, 3, prompt_logprobs=2), ((1, 1.0),))
    driver.run([job], chunk=chunk)
    scores = [score for sample in job.samples for score in sample.prompt_logprobs.scored()]
    expected = reference.logits("rank-8-all-linear", prompt).log_softmax(-1)
    assert [score.token_id for score in scores] == prompt[1:]
    for row, score in enumerate(scores):
        assert abs(score.logprob - expected[row, prompt[row + 1]].item()) < 1e-4
        assert score.top[0][0] == int(expected[row].argmax())


def test_a_slot_can_be_reused_for_another_adapter(base, folders):
    driver = new_driver(base, {})
    first, second = folders["rank-4-attention"], folders["rslora"]
    prompt = list(range(10))
    driver.load(0, first)
    (before,) = driver.run([Job(greedy("a", prompt, 8), ((0, 1.0),))])
    driver.runner.unload_adapter(0)
    driver.load(0, second)
    driver.load(1, first)
    (other,) = driver.run([Job(greedy("b", prompt, 8), ((0, 1.0),))])
    (again,) = driver.run([Job(greedy("c", prompt, 8), ((1, 1.0),))])
    assert before == again
    assert before != other


def test_an_unloaded_adapter_leaves_nothing_in_the_tables(base, folders):
    driver = new_driver(base, folders)
    for slot in range(len(folders)):
        driver.runner.unload_adapter(slot)
    prompt = list(range(10))
    (plain,) = driver.run([Job(greedy("base", prompt, 8))])
    gone = [Job(greedy("gone", prompt, 8), ((1, 1.0),))]
    if device() == "cuda":  # it chooses the captured step by the adapters in the slots
        with pytest.raises(KeyError):
            driver.run(gone)
    else:
        assert driver.run(gone) == [plain]


def test_blocks_of_a_rank_are_what_its_bytes_need(base, folders, driver):
    runner = driver.runner
    num_bytes = sum(
        tensor.numel() * 4
        for tensor in peft.utils.load_peft_weights(str(folders["rank-64-all-linear"])).values()
    )
    blocks = adapter_blocks(runner, folders["rank-64-all-linear"])
    assert num_bytes <= blocks * runner.block_bytes <= 1.1 * num_bytes


def test_a_rank_over_the_limit_is_refused_with_the_limit(base, folders):
    driver = new_driver(base, {}, max_lora_rank=32)
    with pytest.raises(InvalidAdapter, match="32"):
        adapter_blocks(driver.runner, folders["rank-64-all-linear"])


def test_an_adapter_of_another_base_is_refused(folders, tmp_path):
    other = make_base("llama-mha-head-dim", tmp_path)
    driver = new_driver(other, {})
    with pytest.raises(InvalidAdapter, match=r"must be \[96, 8\] on this base"):
        adapter_blocks(driver.runner, folders["rank-8-all-linear"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "tpu"), ("dtype", "int8"), ("load_format", "pickle"), ("arena_bytes", 100)],
)
def test_a_bad_setting_is_refused_by_name(base, field, value):
    settings = {"device": "cpu", "dtype": "float32", "arena_bytes": 1 << 20, field: value}
    with pytest.raises(InvalidRequest, match="kv_memory" if field == "arena_bytes" else field):
        build_runner(base.folder, **settings)
