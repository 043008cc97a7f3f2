"""5,000 tiny adapters, unloaded and uploaded anew under the same names, for a long while."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.adapters.pack.image import ImageFile, image_path
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.messages import AdapterFetched, Command, Gone, UnloadAdapter
from tests.worker import tiny
from tests.worker.commands import make_config, make_submit

NUM_NAMES, NUM_ROUNDS = 5000, 700
RSS_SLACK_BYTES = 32 << 20


def digest_of(name: int, version: int) -> str:
    return "sha256:" + hashlib.sha256(f"{name}/{version}".encode()).hexdigest()


def make_runner(base: Path, arena_bytes: int, overlap: str, cpu_isa: str) -> TorchRunner:
    return build_runner(
        base,
        device="cpu",
        dtype="float32",
        arena_bytes=arena_bytes,
        overlap=overlap,
        cpu_isa=cpu_isa,
    )


@dataclass
class Soak:
    """Names with versions, an engine that serves them, and one that serves one at a time."""

    root: Path
    overlap: str
    cpu_isa: str
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    versions: dict[int, int] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    live: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        base = tiny.write_base(self.root / "base")
        self.runner = make_runner(base, 1 << 20, self.overlap, self.cpu_isa)
        self.alone = make_runner(base, 1 << 20, "off", self.cpu_isa)
        config = make_config(max_resident=64, max_num_seqs=8)
        self.engine = Engine(self.runner, config, time.monotonic)

    def folder(self, name: int) -> Path:
        return self.root / "cache" / digest_of(name, self.versions[name]).removeprefix("sha256:")

    def upload(self, name: int) -> list[Command]:
        """A new version under the same name; the old one's files leave, as from a full cache."""
        commands: list[Command] = []
        if name in self.versions:
            commands.append(Gone(digest_of(name, self.versions[name])))
            shutil.rmtree(self.folder(name))
        self.versions[name] = self.versions.get(name, 0) + 1
        tiny.write_adapter(self.folder(name), seed=name * 1000 + self.versions[name], rank=2)
        return commands

    def request(self, number: int, name: int) -> list[Command]:
        digest = digest_of(name, self.versions[name])
        self.live[str(number)] = (name, number)
        sampling = SamplingParams(max_tokens=4, seed=0, ignore_eos=True)
        submit = make_submit(str(number), self.prompt(number), sampling, [digest])
        return [submit, AdapterFetched(digest, str(self.folder(name)), 2, self.num_pages(name))]

    def prompt(self, number: int) -> list[int]:
        rng = random.Random(number)
        return [rng.randrange(tiny.VOCAB - 1) for _ in range(6)]

    def num_pages(self, name: int) -> int:
        """0 the first time: the engine packs."""
        path = image_path(self.folder(name), self.runner.layout.fingerprint)
        if not path.exists():
            return 0
        with ImageFile(path) as image:
            return image.index.num_pages

    def run(self, commands: list[Command]) -> None:
        while True:
            output = self.engine.step(commands)
            commands = []
            assert not output.failures, output.failures
            for token in output.tokens:
                self.outputs.setdefault(token.request_id, []).extend(token.token_ids)
            if not self.engine.has_requests:
                break
            if not output.tokens:
                time.sleep(0.0005)  # a copy is under way
        self.engine.check_integrity()

    def alone_output(self, number: int, name: int) -> list[int]:
        """What an engine that has just this one adapter says."""
        config = make_config(max_resident=64, max_num_seqs=8, prefix_cache=False)
        stage = Soak.__new__(Soak)
        stage.__dict__.update(self.__dict__)
        stage.engine = Engine(self.alone, config, time.monotonic)
        stage.outputs, stage.live = {}, {}
        stage.run(stage.request(number, name))
        stage.run([UnloadAdapter(digest_of(name, self.versions[name]))])
        return stage.outputs[str(number)]

    def facts(self) -> tuple[int, int, int]:
        """Resident bytes, open files, blocks not free and held by nothing idle."""
        load = self.engine.step([]).load
        used = load.total_blocks - load.free_blocks
        return psutil.Process().memory_info().rss, len(os.listdir("/proc/self/fd")), used


@pytest.mark.long
@pytest.mark.parametrize(
    ("overlap", "cpu_isa"), [("off", "auto"), ("on", "auto"), ("off", "torch")]
)
def test_five_thousand_names_are_served_as_their_digest_and_leave_nothing(
    tmp_path: Path, overlap: str, cpu_isa: str
) -> None:
    soak = Soak(tmp_path, overlap, cpu_isa)
    for name in range(NUM_NAMES):
        soak.upload(name)
    number, early, num_checked = 0, None, 0
    for turn in range(NUM_ROUNDS):
        commands: list[Command] = []
        names = soak.rng.sample(range(NUM_NAMES), 8) + soak.rng.choices(range(40), k=4)
        for name in set(names):
            if soak.rng.random() < 0.2:
                commands += soak.upload(name)
            elif soak.rng.random() < 0.1:
                commands.append(UnloadAdapter(digest_of(name, soak.versions[name])))
            number += 1
            commands += soak.request(number, name)
        soak.run(commands)
        if turn % 7 == 0:
            for request_id, (name, asked) in soak.live.items():
                assert soak.outputs[request_id] == soak.alone_output(asked, name), request_id
                num_checked += 1
        soak.live.clear()
        soak.outputs.clear()
        if turn == NUM_ROUNDS // 5:
            early = soak.facts()
    late = soak.facts()
    assert early is not None
    print(f"{number} requests, {num_checked} compared; rss, files, blocks: {early} -> {late}")
    assert late[0] - early[0] < RSS_SLACK_BYTES
    assert late[1] == early[1] and late[2] == early[2] == 0
