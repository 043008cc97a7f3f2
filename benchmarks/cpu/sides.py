"""The sides of benchmarks on CPUs: the engine in process, and transformers with PEFT."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import median_ratio
from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.scheduling.limits import MAX_STEP_S
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    EngineConfig,
    Prefetch,
    Submit,
    Unpin,
)
from loraplex_services.worker.types.step_plan import SampledRow, StepPlan


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of requests, all submitted at once."""

    wall_s: float
    cpu_s: float
    """Processor time of all our threads, which is steadier than wall time on a shared machine."""
    first_token_s: float
    """Mean over the requests."""
    step_s: float
    """Median of the steps that decode the whole batch and nothing else."""
    step_cpu_s: float
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A `LaunchedStep` that ended before its launch returned."""

    rows: list[SampledRow]

    def choose_tokens(self) -> None:
        """Does nothing: the tokens are chosen."""

    def result(self) -> list[SampledRow]:
        """The rows of the step."""
        return self.rows


@dataclass(slots=True)
class TimedRunner:
    """Delegates to the runner and times its steps."""

    runner: Any
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    """(positions, seconds, processor seconds) of each."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, plan: StepPlan) -> DoneStep:
        """Timed."""
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        rows: list[SampledRow] = self.runner.launch(plan).result()
        elapsed = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        self.steps.append((plan.num_tokens, *elapsed))
        return DoneStep(rows)


class OurEngine:
    """Scheduler, cache and runner; no API server, no wire."""

    def __init__(
        self,
        base: Path,
        dtype: str,
        cpu_isa: str,
        arena_bytes: int,
        max_running: int = 64,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        *,
        drafts: bool = False,
        model_impl: str = "auto",
        max_step_s: float = MAX_STEP_S,
    ) -> None:
        """By default, there are no drafts, so that a step computes one token of each request."""
        config = EngineConfig(
            model_dir=str(base),
            device="cpu",
            dtype=dtype,
            arena_bytes=arena_bytes,
            max_lora_rank=64,
            max_resident=64,
            max_num_batched_tokens=2048,
            max_num_seqs=max_running,
            max_step_s=max_step_s,
            drafts=drafts,
            prefix_cache=False,  # cases share prompts, and peers compute all of them
        )
        runner = build_runner(
            base,
            device="cpu",
            dtype=dtype,
            arena_bytes=arena_bytes,
            cpu_isa=cpu_isa,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            model_impl=model_impl,
        )
        self.dtype = runner.model_info().dtype
        self._threads = torch.get_num_threads()
        self._timed = TimedRunner(runner)
        self._engine = Engine(self._timed, config, time.monotonic)
        self._num_requests = 0
        self.outputs: list[list[int]] = []
        """Token ids of the last run's requests."""

    def touch(self) -> None:
        """Write every byte of the arena, as a worker that has served for a while has done. Virtual
        machines may need milliseconds for each megabyte that is written for the first time."""
        self._timed.arena.data.zero_()

    def load(self, folders: list[Path]) -> list[float]:
        """Load adapters from their packed images, which a worker makes once; the seconds that each
        takes."""
        seconds = []
        for adapter, folder in enumerate(folders):
            digest, num_pages = digest_of(adapter), self._timed.pack_adapter(folder).result()
            begin_s = time.perf_counter()
            self._engine.step(
                [AdapterFetched(digest, str(folder), 64, num_pages), Prefetch(digest, True)]
            )
            while not self._engine.cache.ready([digest]):
                self._timed.await_copies(1.0)
                self._engine.step([])
            seconds.append(time.perf_counter() - begin_s)
            self._engine.step([Unpin(digest)])
        return seconds

    def run(
        self, prompts: list[list[int]], num_adapters: int, num_tokens: int, **sampling: Any
    ) -> Run:
        """Decode all prompts, adapters going round; 0 = the base. Greedy unless `sampling` says
        otherwise."""
        torch.set_num_threads(self._threads)
        self._timed.steps.clear()
        sampling = {"seed": 0, **sampling}
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling)
        commands = [self._submit(i, p, num_adapters, params) for i, p in enumerate(prompts)]
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        first_s: dict[str, float] = {}
        outputs: dict[str, list[int]] = {command.request.request_id: [] for command in commands}
        output = self._engine.step(commands)
        while True:
            now_s = time.perf_counter() - begin_s
            for token in output.tokens:
                first_s.setdefault(token.request_id, now_s)
                outputs[token.request_id].extend(token.token_ids)
            assert not output.failures, output.failures
            if not self._engine.has_requests:
                break
            output = self._engine.step([])
        self.outputs = list(outputs.values())
        decodes = [step for step in self._timed.steps if step[0] == len(prompts)]
        return Run(
            wall_s=now_s,
            cpu_s=time.process_time() - begin_cpu_s,
            first_token_s=statistics.mean(first_s.values()),
            step_s=median_or_nan([step[1] for step in decodes]),
            step_cpu_s=median_or_nan([step[2] for step in decodes]),
            num_steps=len(self._timed.steps),
        )

    def _submit(
        self, i: int, prompt: list[int], num_adapters: int, sampling: SamplingParams
    ) -> Submit:
        self._num_requests += 1
        adapters = ((digest_of(i % num_adapters), 1.0),) if num_adapters else ()
        return Submit(
            request=WorkerRequest(
                request_id=str(self._num_requests),
                prompt_ids=prompt,
                sampling=sampling,
                adapters=AdapterSet(adapters),
            )
        )


def median_or_nan(values: list[float]) -> float:
    """The median; NaN if the run was too short to have a value."""
    return statistics.median(values) if values else math.nan


def median(runs: Sequence[Run], field: str) -> float:
    """The median of one field."""
    return float(statistics.median(getattr(run, field) for run in runs))


def median_ratio_of(over: Sequence[Run], under: Sequence[Run], field: str) -> float:
    """The median of the ratios of one field, of runs that alternated."""
    return median_ratio(*([getattr(run, field) for run in runs] for runs in (over, under)))


def alternated(
    sides: Mapping[str, Any],
    prompts_of: Callable[[int], list[list[int]]],
    num_adapters: int,
    num_tokens: int,
    repetitions: int,
) -> dict[str, list[Run]]:
    """Runs of each side in turns, after one that is not counted. `prompts_of`: the prompts of a
    repetition."""
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for repetition in range(-1, repetitions):
        prompts = prompts_of(repetition)
        for name, side in sides.items():
            run = side.run(prompts, num_adapters, num_tokens)
            if repetition >= 0:
                runs[name].append(run)
    return runs


def digest_of(adapter: int) -> str:
    """A made-up digest of an adapter."""
    return f"sha256:{adapter:064x}"


class PeftMixed:
    """transformers.generate over a left-padded batch, adapters chosen by `adapter_names`."""

    def __init__(self, base: Path, dtype: str, num_threads: int) -> None:
        from transformers import AutoModelForCausalLM

        self._threads = num_threads
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None

    def load(self, folders: list[Path]) -> list[float]:
        """Load adapters next to each other; seconds of each."""
        from peft import PeftModel

        seconds = []
        for adapter, folder in enumerate(folders):
            begin_s = time.perf_counter()
            if adapter == 0:
                self._model = PeftModel.from_pretrained(self._model, folder, adapter_name="0")
            else:
                self._model.load_adapter(folder, adapter_name=str(adapter))
            seconds.append(time.perf_counter() - begin_s)
        self._model.eval()
        return seconds

    def run(self, prompts: list[list[int]], num_adapters: int, num_tokens: int) -> Run:
        """Decode all prompts, adapters going round; 0 = the base, before `load`."""
        torch.set_num_threads(self._threads)
        length = max(map(len, prompts))
        ids = torch.tensor([[1] * (length - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
        marks: list[tuple[float, float]] = []

        def mark(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            marks.append((time.perf_counter(), time.process_time()))
            return scores

        names: dict[str, Any] = {}
        if num_adapters:
            names["adapter_names"] = [str(i % num_adapters) for i in range(len(prompts))]
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                logits_processor=[mark],
                **names,
            )
        gaps = list(pairwise(marks))
        return Run(
            wall_s=time.perf_counter() - begin_s,
            cpu_s=time.process_time() - begin_cpu_s,
            first_token_s=marks[0][0] - begin_s,
            step_s=median_or_nan([after[0] - before[0] for before, after in gaps]),
            step_cpu_s=median_or_nan([after[1] - before[1] for before, after in gaps]),
        )
