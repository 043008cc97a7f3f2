"""The clients of trainers, unmodified, against a running stack.

They do not install beside our tests, so each runs in an environment of its own, whose Python is in
SKYRL_PYTHON, TRL_PYTHON, VERIFIERS_PYTHON, PRIME_RL_PYTHON or VERL_PYTHON. SkyRL and prime-rl need
Python 3.12. Without `--no-deps`, SkyRL, prime-rl and verl also install what their servers need. TRL
and prime-rl use types of vLLM's package; what is called of it needs no GPU. prime-rl is installed
from a clone of its repository, here at 559b4477.

    pip install --no-deps skyrl==0.4.0
    pip install aiohttp orjson pybase64 cloudpathlib transformers peft torch omegaconf hydra-core
    pip install ray loguru fastapi httpx rich typer pillow tqdm jaxtyping tensordict skyrl-gym

    pip install trl==1.16.0 vllm==0.32.0 peft aiohttp

    pip install verifiers==0.4.0 renderers

    pip install --no-deps CLONE/packages/prime-rl-configs CLONE
    pip install verifiers==0.4.0 renderers prime-pydantic-config tenacity loguru vllm==0.26.0

    pip install --no-deps verl==0.9.1
    pip install ray aiohttp openai hydra-core codetiming dill 'tensordict<=0.10' transformers pandas
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import ADAPTERS, BASE, DEMO, Stack, start

pytestmark = pytest.mark.long


def python_with(name: str) -> str:
    """The Python of the environment that has a client; "" = there is none."""
    return os.environ.get(f"{name.upper()}_PYTHON", "")


def needs(name: str) -> pytest.MarkDecorator:
    why = f"{name.upper()}_PYTHON names no Python that has {name}"
    return pytest.mark.skipif(not python_with(name), reason=why)


def run(name: str, *args: str) -> Any:
    """What a client's script prints last."""
    command = [python_with(name), str(Path(__file__).parent / f"{name}_client.py"), *args]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=DEMO)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@needs("skyrl")
def test_skyrl_updates_and_rolls_out(stack: Stack) -> None:
    """The fixture's stack publishes folders below a copy of the demo's adapters."""
    done = run("skyrl", stack.http, "upper", "reverse")
    texts = [rollout["responses"] for rollout in done["rollouts"]]
    assert texts == [["QOHA 688</s>"] * 2, ["886 ahoq</s>"] * 2]
    assert [len(each["logprobs"]) for each in done["sampled"]["sequences"]] == [4, 4, 4]
    assert len(done["sampled"]["prompt_logprobs"]) == 1 + len("qoha 688=")


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    """Reads adapters below `tmp_path`."""
    environment = {"LORAPLEX_LORA_ROOT": str(tmp_path)}
    running = start(tmp_path / "state", "--dtype", "float32", environment=environment)
    try:
        running.publish(*ADAPTERS)
        yield running
    finally:
        assert running.stop() == 0


@needs("trl")
def test_trl_generates_scores_and_publishes_adapters(own_stack: Stack, tmp_path: Path) -> None:
    done = run("trl", own_stack.http, str(BASE), str(tmp_path))
    generated, published = done["generate"], done["publish"]
    assert len(generated["lengths"]) == 4
    assert generated["sampled"] == pytest.approx(generated["scored"], abs=1e-5)
    assert "weight-transfer engine" in generated["refusal"]
    assert published == {"sends_adapters": True, "dtype": "torch.float32", "max_model_len": 512}
    listed = json.loads(own_stack.get("/v1/models")[1])["data"]
    names = {model["id"] for model in listed if model["id"].startswith("trl-policy-")}
    assert names >= {"trl-policy-v2", "trl-policy-v3"}


@needs("verifiers")
def test_the_client_of_prime_rl_samples(stack: Stack) -> None:
    done = run("verifiers", stack.http, str(BASE))
    assert done["content"] == "QOHA 688"
    assert done["finish_reason"] == "stop"
    assert len(done["logprobs"]) == len(done["completion_ids"]) == len("QOHA 688") + 1


@needs("prime_rl")
def test_prime_rl_updates_and_scores(own_stack: Stack, tmp_path: Path) -> None:
    folders = [shutil.copytree(DEMO / "adapters" / n, tmp_path / n) for n in ("upper", "reverse")]
    upper, reverse = run("prime_rl", own_stack.http, *map(str, folders))
    num_prompt_tokens = 1 + len("qoha 688=")
    assert upper[0] == 0.0
    assert len(upper) == len(reverse) == num_prompt_tokens + len("QOHA 688")
    assert sum(upper[num_prompt_tokens:]) > -1.0 > -10.0 > sum(reverse[num_prompt_tokens:])


@needs("verl")
def test_the_requests_of_verl_s_generation_are_answered(stack: Stack) -> None:
    assert run("verl", stack.http, "upper") == ["QOHA 688"] * 2 + ["ZAMIHI 19"] * 2
