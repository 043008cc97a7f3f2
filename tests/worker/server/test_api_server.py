"""Requests in the API server process before the engine has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from loraplex.api.sampling import Grammar, SamplingParams
from loraplex_services.common.telemetry.tracing import Tracer
from loraplex_services.worker.grammars.checker import GrammarChecker
from loraplex_services.worker.server.api_server import ApiServer
from loraplex_services.worker.server.status import StatusBoard
from loraplex_services.worker.types.messages import Command
from tests.worker.commands import make_submit


class Engine:
    """An engine that only listens."""

    is_up = True

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def send(self, *commands: Command) -> None:
        self.commands += commands

    def state(self) -> dict[str, Any]:
        return {}


async def test_a_request_whose_grammar_breaks_the_check_fails_at_once(tmp_path: Path) -> None:
    """Otherwise, it would wait until its deadline. No message can contain this grammar."""
    unused: Any = None
    engine: Any = Engine()
    info = SimpleNamespace(vocab_size=50, max_model_len=20, eos_token_ids=(2,), routing=None)
    ready: Any = SimpleNamespace(info=info)
    server = ApiServer(StatusBoard(), 1, lambda: None, Tracer())
    server.connect(engine, unused, unused, unused, GrammarChecker(tmp_path / "tokenizer.json"))
    server._engine = ready
    session = server.open_session("g")
    asked = make_submit("r", [1], SamplingParams(max_tokens=4, seed=0)).request
    server.submit(session, replace(asked, grammar=Grammar(regex="\ud800")))
    news = await session.next()
    assert news is not None
    [(request_id, error)] = news.failures
    assert (request_id, error.reason) == ("r", "INTERNAL")
    assert (server.num_live, engine.commands) == (0, [])
