"""Converts OpenAI request bodies to `GenerateCall`s."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from loraplex.api.request import ChatPrompt, Prompt, RequestedAdapter, UpdatePolicy
from loraplex.api.sampling import Grammar, Sampling
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import (
    MAX_SEQUENCES_PER_REQUEST,
    MAX_SPLIT_KEY_CHARS,
    check_chars,
)
from loraplex_services.gateway.http.body import Body, bad_type
from loraplex_services.gateway.http.guided import read_grammar
from loraplex_services.gateway.http.prompts import (
    PROMPTS,
    parse_conversation,
    parse_prompts,
)
from loraplex_services.gateway.http.routed_experts import ExpertsRequest, read_experts_request
from loraplex_services.gateway.http.tool_choice import read_tools
from loraplex_services.gateway.registry.keyring import runs_all_adapters
from loraplex_services.gateway.request import GenerateCall, beginning_hash
from loraplex_services.gateway.tools.thought_budget import FIELD as BUDGET
from loraplex_services.gateway.tools.tool_use import ToolUse

COMPLETION_FIELDS = {"scale": "lora_scale"}
NO_EXPERTS = ExpertsRequest()
CHAT_FIELDS = {"scale": "lora_scale", "prompt": "messages", "logprobs": "top_logprobs"}
"""The names that callers use for our fields."""
_SPLIT_KEY = "x-loraplex-split-key"


@dataclass(frozen=True, slots=True)
class Origin:
    """The parts of an HTTP request outside its body."""

    request_id: str
    tenant: str
    split_key: str
    trace: str
    runs_all: bool = False
    """As in `GenerateCall`."""
    timeout_s: float | None = None
    priority: int | None = None
    """Takes precedence over the priority in the body; None = that of the body counts."""


def origin_of(request: Request, caller: Caller) -> Origin:
    """The origin of a caller's request."""
    return Origin(
        request_id=request.state.request_id,
        tenant=caller.tenant,
        runs_all=runs_all_adapters(caller),
        split_key=request.headers.get(_SPLIT_KEY, ""),
        trace=request.headers.get("traceparent", ""),
        priority=getattr(request.state, "priority", None),
    )


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """One HTTP request: a call per prompt, and how to format the answer."""

    request_id: str
    """Id of all its calls. Those of several prompts add a number to it."""
    model: str
    calls: tuple[GenerateCall, ...]
    is_chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Chunks of a stream contain the usage so far."""
    return_token_ids: bool
    field_names: dict[str, str]
    tool_use: ToolUse = field(default_factory=ToolUse)
    grammar: Grammar | None = None
    """The response format; answers that are calls need not match it."""
    tokens_as_ids: bool = False
    """Logprobs show tokens as `token_id:N`."""
    include_reasoning: bool = True
    """False drops thoughts from the answer."""
    thinking_budget: int | None = None
    """Most tokens of a thought; None = as many as the answer may have."""
    experts: ExpertsRequest = NO_EXPERTS


def parse_completion(fields: dict[str, Any], origin: Origin) -> OpenAICall:
    """Body of /v1/completions. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    special = body.flag("add_special_tokens", default=True)
    prompts = parse_prompts("prompt", body.raw("prompt", PROMPTS), special)
    sampling = read_sampling(
        body, max_tokens=body.integer("max_tokens"), logprobs=body.count("logprobs")
    )
    if (best_of := body.integer("best_of")) not in (None, 1, sampling.n):
        raise Unsupported.field("best_of", best_of, "only best_of equal to n is served")
    experts = read_experts_request(body)
    return call_of(body, fields, origin, prompts, sampling, is_chat=False, experts=experts)


def parse_chat(fields: dict[str, Any], origin: Origin) -> OpenAICall:
    """Body of /v1/chat/completions. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    tool_use = read_tools(body)
    prompt = parse_conversation(body, tool_use)
    include_reasoning = body.flag("include_reasoning", default=True)
    budget = _thinking_budget(body)
    max_tokens, limit = body.integer("max_tokens"), body.integer("max_completion_tokens")
    wants_logprobs, top = body.flag("logprobs"), body.integer("top_logprobs")
    if top is not None and not wants_logprobs:
        if top:
            raise InvalidRequest.field("top_logprobs", top, "needs logprobs: true")
        top = None
    logprobs = (top or 0) if wants_logprobs else None
    sampling = read_sampling(
        body, max_tokens=limit if limit is not None else max_tokens, logprobs=logprobs
    )
    if sampling.echo:
        raise Unsupported.field("echo", True, "only completions can echo the prompt")
    call = call_of(
        body,
        fields,
        origin,
        [prompt],
        sampling,
        is_chat=True,
        must_call=tool_use.must_call,
        experts=read_experts_request(body),
    )
    if budget is not None and call.grammar is not None:
        why = "answers in a format have no thought; leave one of both out"
        raise Unsupported.field(BUDGET, budget, why)
    call = replace(
        call,
        tool_use=tool_use,
        include_reasoning=include_reasoning,
        thinking_budget=budget,
    )
    if budget is not None and not tool_use.tools:
        call.field_names["grammar"] = BUDGET
    if limit is not None:
        call.field_names["max_tokens"] = "max_completion_tokens"
    return call


def _thinking_budget(body: Body) -> int | None:
    budget = body.integer(BUDGET)
    if budget is not None and budget < 0:
        raise InvalidRequest.field(BUDGET, budget, "must be at least 0")
    return budget


def call_of(
    body: Body,
    fields: dict[str, Any],
    origin: Origin,
    prompts: list[Prompt],
    sampling: Sampling,
    *,
    is_chat: bool,
    must_call: bool = False,
    experts: ExpertsRequest,
) -> OpenAICall:
    """The common part of all calls that generate. Raises: InvalidRequest, Unsupported."""
    model = model_of(body)
    origin = replace(origin, request_id=body.text("request_id") or origin.request_id)
    stream = body.flag("stream")
    _check_sequences(len(prompts), sampling.n or 1)
    include_usage, continuous_usage = _stream_options(body.inner("stream_options"), stream)
    if stream and sampling.prompt_logprobs is not None:
        raise Unsupported.field(
            "prompt_logprobs",
            sampling.prompt_logprobs,
            "are not available in streams; leave out stream",
        )
    experts.check_stream(stream)
    return_token_ids = body.flag("return_token_ids")
    tokens_as_ids = body.flag("return_tokens_as_token_ids")
    grammar, grammar_field = _answer_grammar(body, prompts[0], must_call=must_call)
    first = _first_call(body, origin, model, prompts[0], replace(sampling, grammar=grammar))
    first = replace(first, routed_from=experts.start)
    body.finish()
    calls = tuple(
        replace(
            first,
            request_id=origin.request_id if len(prompts) == 1 else f"{origin.request_id}-{index}",
            prompt=prompt,
            split_key=split_key_of(fields, origin, prompt),
        )
        for index, prompt in enumerate(prompts)
    )
    names = {**(CHAT_FIELDS if is_chat else COMPLETION_FIELDS), "grammar": grammar_field}
    names["routed_from"] = experts.name
    return OpenAICall(
        origin.request_id,
        model,
        calls,
        is_chat,
        stream,
        include_usage,
        continuous_usage,
        return_token_ids,
        names,
        grammar=grammar,
        tokens_as_ids=tokens_as_ids,
        experts=experts,
    )


def model_of(body: Body) -> str:
    """The model of a body. Raises: InvalidRequest without one."""
    model = body.text("model")
    if not model:
        raise InvalidRequest.field("model", model or "", "name a base or an adapter")
    return model


def _first_call(
    body: Body, origin: Origin, model: str, prompt: Prompt, sampling: Sampling
) -> GenerateCall:
    """The call of one prompt; those of others differ by prompt, id and split key."""
    priority = body.integer("priority") or 0
    if origin.priority is not None:
        priority = origin.priority
    if not -(1 << 31) <= priority < 1 << 31:
        raise InvalidRequest.field("priority", priority, "must be a 32-bit integer")
    return GenerateCall(
        tenant=origin.tenant,
        runs_all=origin.runs_all,
        model=model,
        prompt=prompt,
        sampling=sampling,
        adapters=_adapters(body.raw("adapters", {"type": "array"})),
        cache_salt=body.text("cache_salt") or "",
        priority=priority,
        timeout_s=origin.timeout_s,
        first_token_s=body.number("first_token_s"),
        on_update=UpdatePolicy.parse(body.text("on_update") or UpdatePolicy.FINISH),
        trace=origin.trace,
        truncate_prompt_tokens=body.integer("truncate_prompt_tokens"),
    )


def _answer_grammar(body: Body, prompt: Prompt, *, must_call: bool) -> tuple[Grammar | None, str]:
    """The response format of answers that are not calls, and the field that constrains output."""
    grammar, name = read_grammar(body)
    offers_tools = isinstance(prompt, ChatPrompt) and bool(prompt.tools)
    if not offers_tools:
        return grammar, name
    if grammar is not None and name != "response_format":
        raise Unsupported.field(
            name, "", "with tools, use response_format to constrain answers to a schema"
        )
    return (None, "tools") if grammar is None or must_call else (grammar, name)


def read_sampling(body: Body, *, max_tokens: int | None, logprobs: int | None) -> Sampling:
    """The sampling fields of a body. Raises: InvalidRequest."""
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.integer("min_tokens"),
        temperature=body.number("temperature"),
        top_p=body.number("top_p"),
        top_k=body.integer("top_k"),
        min_p=body.number("min_p"),
        seed=body.integer("seed"),
        stop=body.texts("stop"),
        stop_token_ids=body.ids("stop_token_ids"),
        ignore_eos=body.flag("ignore_eos"),
        repetition_penalty=body.number("repetition_penalty"),
        presence_penalty=body.number("presence_penalty"),
        frequency_penalty=body.number("frequency_penalty"),
        logit_bias=body.bias("logit_bias"),
        logprobs=logprobs,
        logprob_token_ids=body.ids("logprob_token_ids"),
        prompt_logprobs=body.count("prompt_logprobs"),
        n=body.integer("n"),
        echo=body.flag("echo"),
        allowed_token_ids=body.ids("allowed_token_ids"),
        bad_token_ids=body.ids("bad_token_ids"),
        bad_words=body.texts("bad_words"),
        include_stop_str_in_output=body.flag("include_stop_str_in_output"),
        skip_special_tokens=body.flag("skip_special_tokens", default=True),
        scale=body.number("lora_scale"),
    )


def _adapters(value: Any) -> tuple[RequestedAdapter, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad_type("adapters", value, "a list of {ref, weight}")
    return tuple(_adapter(item, f"adapters[{index}]") for index, item in enumerate(value))


def _adapter(item: Any, field: str) -> RequestedAdapter:
    if not isinstance(item, dict):
        raise bad_type(field, item, "an object with ref and weight")
    body = Body(item, f"{field}.")
    ref, weight = body.text("ref"), body.number("weight")
    if not ref:
        raise InvalidRequest.field(f"{field}.ref", "", "name an adapter")
    body.finish()
    return RequestedAdapter(ref, weight)


def _check_sequences(num_prompts: int, num_choices: int) -> None:
    """Raises: InvalidRequest if one request becomes too many sequences."""
    if num_prompts * num_choices > MAX_SEQUENCES_PER_REQUEST:
        raise InvalidRequest.field(
            "n",
            num_choices,
            f"{num_prompts} prompts times n exceed {MAX_SEQUENCES_PER_REQUEST} sequences",
        )


def _stream_options(body: Body | None, stream: bool) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether each chunk contains it."""
    if body is None:
        return False, False
    if not stream:
        raise InvalidRequest.field("stream_options", "", "needs stream: true")
    is_continuous = body.flag("continuous_usage_stats")
    include_usage = body.flag("include_usage", default=is_continuous)
    if is_continuous and not include_usage:
        raise InvalidRequest.field(
            "stream_options.continuous_usage_stats", "true", "needs include_usage: true"
        )
    body.flag("include_obfuscation")
    body.finish()
    return include_usage, is_continuous


def split_key_of(fields: dict[str, Any], origin: Origin, prompt: Prompt) -> str:
    """The header, else prompt_cache_key or user, else a hash of the start of the conversation.
    Raises: InvalidRequest for a long one, naming what the caller sent."""
    given = ((name, fields.get(name)) for name in ("prompt_cache_key", "user"))
    for name, value in ((_SPLIT_KEY, origin.split_key), *given):
        if isinstance(value, str) and value:
            return check_chars(name, value, MAX_SPLIT_KEY_CHARS)
    return beginning_hash(prompt)
