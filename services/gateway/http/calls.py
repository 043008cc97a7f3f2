"""From OpenAI request bodies to `GenerateCall`s."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from loraplex.api.sampling import Grammar, Sampling
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.common.limits import MAX_SEQUENCES_PER_REQUEST
from loraplex_services.gateway.http.body import Body, bad_type, is_id
from loraplex_services.gateway.http.guided import read_grammar
from loraplex_services.gateway.http.tool_choice import read_tools, template_messages
from loraplex_services.gateway.request import (
    AskedAdapter,
    ChatPrompt,
    GenerateCall,
    Prompt,
    TextPrompt,
    TokenPrompt,
    beginning_hash,
)
from loraplex_services.gateway.tools.tool_use import ToolUse

MAX_PROMPTS = 1024
COMPLETION_FIELDS = {"scale": "lora_scale"}
CHAT_FIELDS = {"scale": "lora_scale", "prompt": "messages", "logprobs": "top_logprobs"}
"""Names that callers use for our fields."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What an HTTP request contains outside its body."""

    request_id: str
    tenant: str
    split_key: str
    trace: str
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """One HTTP request: a call per prompt, and how to format the answer."""

    model: str
    calls: tuple[GenerateCall, ...]
    is_chat: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    field_names: dict[str, str]
    tool_use: ToolUse = field(default_factory=ToolUse)
    grammar: Grammar | None = None
    """The grammar for the complete answer, apart from tool calls."""
    include_reasoning: bool = True
    """False drops thoughts from the answer."""


def parse_completion(fields: dict[str, Any], origin: Origin) -> OpenAICall:
    """Body of /v1/completions. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    special = body.flag("add_special_tokens", default=True)
    prompts = parse_prompts("prompt", body.raw("prompt"), special)
    asked = _sampling(
        body, max_tokens=body.integer("max_tokens"), logprobs=body.integer("logprobs")
    )
    if (best_of := body.integer("best_of")) not in (None, 1, asked.n):
        raise Unsupported.field("best_of", best_of, "only best_of equal to n is served")
    return _call(body, fields, origin, prompts, asked, is_chat=False)


def parse_chat(fields: dict[str, Any], origin: Origin) -> OpenAICall:
    """Body of /v1/chat/completions. Raises: InvalidRequest, Unsupported."""
    body = Body(fields)
    tool_use = read_tools(body)
    prompt = parse_conversation(body, tool_use)
    include_reasoning = body.flag("include_reasoning", default=True)
    max_tokens, limit = body.integer("max_tokens"), body.integer("max_completion_tokens")
    wants_logprobs, top = body.flag("logprobs"), body.integer("top_logprobs")
    if top is not None and not wants_logprobs:
        if top:
            raise InvalidRequest.field("top_logprobs", top, "needs logprobs: true")
        top = None
    logprobs = (top or 0) if wants_logprobs else None
    asked = _sampling(
        body, max_tokens=limit if limit is not None else max_tokens, logprobs=logprobs
    )
    if asked.echo:
        raise Unsupported.field("echo", True, "only completions can echo the prompt")
    asked = replace(asked, grammar=tool_use.grammar)
    call = _call(body, fields, origin, [prompt], asked, is_chat=True)
    call = replace(call, tool_use=tool_use, include_reasoning=include_reasoning)
    if limit is not None:
        call.field_names["max_tokens"] = "max_completion_tokens"
    return call


def _call(
    body: Body,
    fields: dict[str, Any],
    origin: Origin,
    prompts: list[Prompt],
    asked: Sampling,
    *,
    is_chat: bool,
) -> OpenAICall:
    model = body.text("model")
    if not model:
        raise InvalidRequest.field("model", model or "", "name a base or an adapter")
    stream = body.flag("stream")
    _check_sequences(len(prompts), asked.n or 1)
    include_usage = _include_usage(body.raw("stream_options"), stream)
    return_token_ids = body.flag("return_token_ids")
    adapters = _adapters(body.raw("adapters"))
    cache_salt, priority = body.text("cache_salt") or "", body.integer("priority") or 0
    if not -(1 << 31) <= priority < 1 << 31:
        raise InvalidRequest.field("priority", priority, "must be a 32-bit integer")
    first_token_s = body.number("first_token_s")
    grammar, grammar_field = read_grammar(body)
    if grammar is not None and _offers_tools(prompts[0]) and grammar_field != "response_format":
        raise Unsupported.field(
            grammar_field, "", "with tools, use response_format to constrain answers to a schema"
        )
    if grammar is not None and asked.grammar is None:
        asked = replace(asked, grammar=grammar)
    elif _offers_tools(prompts[0]):
        grammar_field = "tools"
    body.finish()
    calls = tuple(
        GenerateCall(
            request_id=origin.request_id if len(prompts) == 1 else f"{origin.request_id}-{index}",
            tenant=origin.tenant,
            model=model,
            prompt=prompt,
            sampling=asked,
            adapters=adapters,
            cache_salt=cache_salt,
            priority=priority,
            split_key=split_key_of(fields, origin, prompt),
            timeout_s=origin.timeout_s,
            first_token_s=first_token_s,
            trace=origin.trace,
        )
        for index, prompt in enumerate(prompts)
    )
    names = {**(CHAT_FIELDS if is_chat else COMPLETION_FIELDS), "grammar": grammar_field}
    return OpenAICall(
        model,
        calls,
        is_chat,
        stream,
        include_usage,
        return_token_ids,
        names,
        grammar=asked.grammar,
    )


def _sampling(body: Body, *, max_tokens: int | None, logprobs: int | None) -> Sampling:
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
        n=body.integer("n"),
        echo=body.flag("echo"),
        allowed_token_ids=body.ids("allowed_token_ids"),
        bad_token_ids=body.ids("bad_token_ids"),
        include_stop_str_in_output=body.flag("include_stop_str_in_output"),
        skip_special_tokens=body.flag("skip_special_tokens", default=True),
        scale=body.number("lora_scale"),
    )


def parse_prompts(field: str, value: Any, add_special_tokens: bool) -> list[Prompt]:
    """Text, a list of texts, token ids, or a list of those; ids are taken as they are."""
    if isinstance(value, str):
        return [TextPrompt(value, add_special_tokens)]
    if value is None or value == []:
        raise InvalidRequest.field(field, "", f"the {field} is missing or empty")
    if not isinstance(value, list):
        raise _bad_prompt(field, value)
    if all(is_id(item) for item in value):
        return [TokenPrompt(tuple(value))]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest.field(field, len(value), f"at most {MAX_PROMPTS} prompts at once")
    return [_listed_prompt(field, item, add_special_tokens) for item in value]


def _listed_prompt(field: str, item: Any, add_special_tokens: bool) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(item, add_special_tokens)
    if isinstance(item, list) and all(is_id(token_id) for token_id in item):
        return TokenPrompt(tuple(item))
    raise _bad_prompt(field, item)


def _bad_prompt(field: str, value: object) -> InvalidRequest:
    return bad_type(field, value, "text, a list of texts, token ids or a list of token id lists")


def parse_conversation(body: Body, tool_use: ToolUse) -> ChatPrompt:
    """A conversation and the options of its template. Raises: InvalidRequest."""
    options = body.raw("chat_template_kwargs")
    if options is not None and not isinstance(options, dict):
        raise bad_type("chat_template_kwargs", options, "an object")
    effort = body.text("reasoning_effort")
    return ChatPrompt(
        template_messages(_messages(body.raw("messages"))),
        body.flag("add_special_tokens"),
        tool_use.tools,
        {**(options or {}), **({"reasoning_effort": effort} if effort else {})},
    )


def _offers_tools(prompt: Prompt) -> bool:
    return isinstance(prompt, ChatPrompt) and bool(prompt.tools)


def _messages(value: Any) -> tuple[dict[str, object], ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest.field("messages", "", "must be a list of at least one message")
    return tuple(_message(message, index) for index, message in enumerate(value))


def _message(message: Any, index: int) -> dict[str, object]:
    field = f"messages[{index}]"
    if not isinstance(message, dict):
        raise bad_type(field, message, "an object with role and content")
    if not isinstance(message.get("role"), str):
        raise bad_type(f"{field}.role", message.get("role"), "a string")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, f"{field}.content") for part in content)
    if content is not None and not isinstance(content, str):
        raise bad_type(f"{field}.content", content, "a string or a list of text parts")
    if content is None and not message.get("tool_calls"):
        raise InvalidRequest.field(f"{field}.content", "", "the message needs content")
    return {**message, "content": content}


def _text_part(part: Any, field: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise Unsupported.field(field, "", "only parts of type text are served")


def _adapters(value: Any) -> tuple[AskedAdapter, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad_type("adapters", value, "a list of {ref, weight}")
    return tuple(_adapter(item, f"adapters[{index}]") for index, item in enumerate(value))


def _adapter(item: Any, field: str) -> AskedAdapter:
    if not isinstance(item, dict):
        raise bad_type(field, item, "an object with ref and weight")
    body = Body(item, f"{field}.")
    ref, weight = body.text("ref"), body.number("weight")
    if not ref:
        raise InvalidRequest.field(f"{field}.ref", "", "name an adapter")
    body.finish()
    return AskedAdapter(ref, weight)


def _check_sequences(num_prompts: int, num_choices: int) -> None:
    """Raises: InvalidRequest if one request becomes too many sequences."""
    if num_prompts * num_choices > MAX_SEQUENCES_PER_REQUEST:
        raise InvalidRequest.field(
            "n",
            num_choices,
            f"{num_prompts} prompts times n exceed {MAX_SEQUENCES_PER_REQUEST} sequences",
        )


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad_type("stream_options", options, "an object")
    if not stream:
        raise InvalidRequest.field("stream_options", "", "needs stream: true")
    body = Body(options)
    include_usage = body.flag("include_usage")
    body.flag("include_obfuscation")
    body.flag("continuous_usage_stats")
    body.finish()
    return include_usage


def split_key_of(fields: dict[str, Any], origin: Origin, prompt: Prompt) -> str:
    """The header, else prompt_cache_key or user, else a hash of the start of the conversation."""
    for value in (origin.split_key, fields.get("prompt_cache_key"), fields.get("user")):
        if isinstance(value, str) and value:
            return value
    return beginning_hash(prompt)
