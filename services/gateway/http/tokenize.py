"""/tokenize and /detokenize in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.api.request import Prompt, TokenPrompt
from loraplex.errors import InvalidRequest, LoraplexError, Unavailable
from loraplex_services.common.callers import Caller
from loraplex_services.gateway.http.body import STRING, Body
from loraplex_services.gateway.http.collected import LargeAnswers
from loraplex_services.gateway.http.json_body import read_json
from loraplex_services.gateway.http.prompts import parse_conversation, parse_prompts
from loraplex_services.gateway.http.sse import compact_json, json_in_parts
from loraplex_services.gateway.http.tool_choice import read_tools
from loraplex_services.gateway.registry.keyring import runs_all_adapters
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.request import GenerateCall, with_names
from loraplex_services.gateway.text.adapter_text import AdapterText
from loraplex_services.gateway.text.detokenize import decode_all
from loraplex_services.gateway.text.tokenizer import ServedBase, check_ids
from loraplex_services.gateway.workers.fleet import Fleet

_MANY_TOKENS = 2048
"""Answers of more tokens are formatted in a thread."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptEncoder:
    """Turns prompts into token ids as requests would, without a worker."""

    resolver: Resolver
    fleet: Fleet
    adapter_text: AdapterText
    charge: Callable[[str], Awaitable[object]]
    """Counts a request of a tenant for its rate. Raises ResourceExhausted."""

    async def encode(
        self, model: str | None, caller: Caller, prompt: Prompt, field: str
    ) -> tuple[ServedBase, tuple[int, ...]]:
        """The tokens of a prompt that came in `field`, and what they belong to.

        Raises: InvalidRequest, NotFound, ResourceExhausted, Unavailable.
        """
        served = await self.served(model, caller, prompt)
        try:
            return served, await served.tokenizer.encode(prompt, served.model, caller.tenant)
        except LoraplexError as error:
            raise with_names(error, {"prompt": field, "messages": field}) from None

    async def served(self, model: str | None, caller: Caller, prompt: Prompt) -> ServedBase:
        """The tokenizer of a model, by default the first base, for one request of a caller.

        Raises: NotFound, ResourceExhausted, Unavailable.
        """
        tenant, runs_all = caller.tenant, runs_all_adapters(caller)
        await self.charge(tenant)
        bases = self.resolver.bases()
        model = model or next(iter(bases), None)
        if model is None:
            raise Unavailable("no worker is ready; retry shortly", retry_after_s=1.0)
        call = GenerateCall(model=model, prompt=prompt, tenant=tenant, runs_all=runs_all)
        target = await self.resolver.target(call)
        served = self.fleet.served(target.base_id)
        tokenizer = await self.adapter_text.tokenizer(served, target, tenant)
        return ServedBase(served.model.under(target.adapters), tokenizer)


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    """Names of tokenizer_config.json, if the base has them."""

    model_max_length: int
    bos_token: NotRequired[str]
    eos_token: NotRequired[str]
    unk_token: NotRequired[str]
    pad_token: NotRequired[str]
    sep_token: NotRequired[str]
    cls_token: NotRequired[str]
    chat_template: NotRequired[str]


@dataclass(frozen=True, slots=True, eq=False)
class TokenizeEndpoints:
    """Endpoints over the tokenizers of bases and adapters."""

    caller: Callable[[Request], Awaitable[Caller]]
    """Charges for the text of a body."""
    reader: Callable[[Request], Awaitable[Caller]]
    """Charges for one call."""
    encoder: PromptEncoder
    large: LargeAnswers

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.info, methods=["GET"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize with `prompt` or `messages`."""
        caller = await self.caller(request)
        call = parse_tokenize(await read_json(request, caller))
        served, ids = await self.encoder.encode(call.model, caller, call.prompt, call.field)
        name_of = served.tokenizer.tokens.name_of

        def formatted() -> bytes:
            response: TokenizeResponse = {
                "count": len(ids),
                "max_model_len": served.model.max_model_len,
                "tokens": ids,
                "token_strs": list(map(name_of, ids)) if call.shows_names else None,
            }
            return json_in_parts(response)

        return await self._response(caller, len(ids), formatted)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize with `tokens`; special tokens are shown."""
        caller = await self.caller(request)
        model, ids = parse_detokenize(await read_json(request, caller))
        served = await self.encoder.served(model, caller, TokenPrompt(ids))
        if len(ids) > served.model.max_model_len:
            raise InvalidRequest.field(
                "tokens", len(ids), f"at most {served.model.max_model_len} tokens, the context"
            )
        try:
            check_ids(ids, served.model)
        except LoraplexError as error:
            raise with_names(error, {"prompt": "tokens"}) from None
        tokens = served.tokenizer.tokens

        def formatted() -> bytes:
            response: DetokenizeResponse = {"prompt": decode_all(tokens, ids, skip_special=False)}
            return compact_json(response).encode()

        return await self._response(caller, len(ids), formatted)

    async def info(self, request: Request) -> Response:
        """GET /tokenizer_info: special tokens and chat template of the first base, as in vLLM."""
        caller = await self.reader(request)
        served = await self.encoder.served(None, caller, TokenPrompt(()))
        response: TokenizerInfo = {
            "model_max_length": served.model.max_model_len,
            **served.tokenizer.info,  # type: ignore[typeddict-item]
        }
        return Response(compact_json(response), media_type="application/json")

    async def _response(
        self, caller: Caller, num_tokens: int, formatted: Callable[[], bytes]
    ) -> Response:
        """JSON. Many tokens are formatted in a thread."""
        if num_tokens <= _MANY_TOKENS:
            content = formatted()
        else:
            content = await self.large.formatted(caller.tenant, formatted)
        return Response(content, media_type="application/json")


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A request for the tokens of a prompt."""

    model: str | None
    prompt: Prompt
    field: str
    """The field that contained the prompt."""
    shows_names: bool


def parse_tokenize(fields: dict[str, Any]) -> TokenizeCall:
    """Body of /tokenize. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    model = body.text("model")
    shows_names = body.flag("return_token_strs")
    prompt, field = _prompt(body)
    body.finish()
    return TokenizeCall(model, prompt, field, shows_names)


def parse_detokenize(fields: dict[str, Any]) -> tuple[str | None, tuple[int, ...]]:
    """Body of /detokenize: the model and the tokens. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    model, ids = body.text("model"), body.ids("tokens")
    body.finish()
    return model, ids


def _prompt(body: Body) -> tuple[Prompt, str]:
    """A text or a conversation, and the field it came in. Raises: InvalidRequest."""
    text = body.raw("prompt", STRING)
    if text is None:
        return parse_conversation(body, read_tools(body)), "messages"
    if not isinstance(text, str):
        raise InvalidRequest.field("prompt", "", "must be a string; or send messages")
    body.flag("add_generation_prompt", default=True)
    (prompt,) = parse_prompts("prompt", text, body.flag("add_special_tokens", default=True))
    return prompt, "prompt"
