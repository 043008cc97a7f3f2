"""SkyRL's own client, unmodified, trains against a running stack.

It needs Python 3.12 and does not install beside our tests, so it runs in an environment of its own:

    python3.12 -m venv skyrl && skyrl/bin/pip install 'skyrl[skyrl-train]'
    SKYRL_PYTHON=skyrl/bin/python pytest -m long tests/e2e/test_skyrl.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.stack import DEMO, Stack

SKYRL_PYTHON = os.environ.get("SKYRL_PYTHON", "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not SKYRL_PYTHON, reason="SKYRL_PYTHON names no Python that has SkyRL"),
]


def test_updates_and_rollouts(stack: Stack) -> None:
    """The fixture's stack publishes folders below a copy of the demo's adapters."""
    folders = ["upper", "reverse"]
    command = [SKYRL_PYTHON, str(Path(__file__).parent / "skyrl_client.py"), stack.http, *folders]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=DEMO)
    assert ran.returncode == 0, ran.stderr
    done = json.loads(ran.stdout.splitlines()[-1])
    texts = [rollout["responses"] for rollout in done["rollouts"]]
    assert texts == [["QOHA 688</s>"] * 2, ["886 ahoq</s>"] * 2]
    assert [len(each["logprobs"]) for each in done["sampled"]["sequences"]] == [4, 4, 4]
    assert len(done["sampled"]["prompt_logprobs"]) == 1 + len("qoha 688=")
