"""Converts requests to and from their protobuf messages.

Numbers, texts and lists of numbers are converted by name, so that a new field of that kind needs
no line here. A field that is 0 or empty in a message has the default of its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message

from loraplex.api.fields import field_names
from loraplex.api.pooling import Pooling
from loraplex.api.request import (
    AdapterSet,
    ChatPrompt,
    GenerateRequest,
    KeptPrefix,
    Prompt,
    RequestedAdapter,
    TextPrompt,
    TokenPrompt,
    UpdatePolicy,
    WorkerRequest,
)
from loraplex.api.sampling import Grammar, GrammarTokens, Sampling, SamplingParams
from loraplex.api.wire import (
    grammar_from_proto,
    grammar_to_proto,
    pooling_from_proto,
    pooling_to_proto,
    sampling_from_proto,
    sampling_params_from_proto,
    sampling_params_to_proto,
    sampling_to_proto,
    set_fields,
)
from loraplex.errors import InvalidRequest, Unsupported
from loraplex.v1 import inference_pb2, worker_pb2


def prompt_into(
    message: inference_pb2.GenerateRequest | inference_pb2.Prompt, prompt: Prompt
) -> None:
    """Put a prompt into a message. Mutates it.

    Raises:
        InvalidRequest: it has token ids that the wire cannot carry.
    """
    match prompt:
        case TextPrompt():
            message.text = prompt.text
        case TokenPrompt():
            try:
                message.token_ids.ids.extend(prompt.ids)
            except ValueError:
                raise InvalidRequest("prompt: token ids are 0 to 4294967295") from None
        case ChatPrompt():
            assert not prompt.tools and not prompt.template_options, "they have no form in gRPC"
            message.chat.messages.extend(
                inference_pb2.ChatMessage(role=str(m["role"]), content=str(m["content"]))
                for m in prompt.messages
            )


def prompt_from_proto(
    message: inference_pb2.GenerateRequest | inference_pb2.Prompt,
    field: str,
    *,
    generates: bool = True,
) -> Prompt:
    """A prompt in any form; `generates`: whether a chat prompt ends with the start of an answer.

    Raises:
        InvalidRequest: there is no prompt. The error names `field`.
    """
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case "chat" if message.chat.messages:
            messages = tuple({"role": m.role, "content": m.content} for m in message.chat.messages)
            return ChatPrompt(messages, add_generation_prompt=generates)
        case "chat":
            raise InvalidRequest.field("messages", "", "send at least one message")
    raise InvalidRequest.field(field, "", "send text, token_ids or chat")


def generate_request_to_proto(request: GenerateRequest) -> inference_pb2.GenerateRequest:
    """A client's request.

    Raises:
        InvalidRequest: it names the field whose value the message cannot hold.
    """
    message = inference_pb2.GenerateRequest()
    for name, value in _given(request):
        match value:
            case TextPrompt() | TokenPrompt() | ChatPrompt():
                prompt_into(message, value)
            case Sampling():
                message.sampling.CopyFrom(sampling_to_proto(value))
            case UpdatePolicy():
                message.on_update = _UPDATE_POLICIES[value]
            case (RequestedAdapter(), *_):
                message.adapters.extend(
                    inference_pb2.WeightedAdapter(ref=each.ref, weight=each.weight)
                    for each in value
                )
            case _:
                _put(message, name, value)
    return message


def generate_request_from_proto(message: inference_pb2.GenerateRequest) -> GenerateRequest:
    """The inverse. Raises: InvalidRequest without a prompt."""
    values = set_fields(message, _GENERATE_READERS)
    for form in ("text", "token_ids", "chat"):
        values.pop(form, None)
    values = {"model": "", **values, "prompt": prompt_from_proto(message, "prompt")}
    return GenerateRequest(**values)


def worker_request_to_proto(request: WorkerRequest) -> worker_pb2.WorkerRequest:
    """A request for a worker."""
    message = worker_pb2.WorkerRequest()
    for name, value in _given(request):
        match value:
            case SamplingParams():
                message.sampling.CopyFrom(sampling_params_to_proto(value))
            case AdapterSet():
                for digest, weight in value.adapters:
                    message.adapters.add(digest=digest, weight=weight)
            case Grammar():
                message.grammar.CopyFrom(grammar_to_proto(value))
            case GrammarTokens():
                for token_id, text in value.added:
                    message.grammar_tokens.add(token_id=token_id, content=text)
                message.grammar_eos_ids.extend(value.eos_ids)
            case (KeptPrefix(), *_):
                for part in value:
                    kept = message.kept.add(num_tokens=part.num_tokens)
                    for digest, weight in part.adapters.adapters:
                        kept.adapters.add(digest=digest, weight=weight)
            case Pooling():
                message.pooling = pooling_to_proto(value)
            case _:
                _put(message, name, value)
    return message


def worker_request_from_proto(message: worker_pb2.WorkerRequest) -> WorkerRequest:
    """The inverse; the values are unchecked. Without a salt of its own it has its tenant's."""
    values = set_fields(message, _WORKER_READERS)
    values.pop("grammar_eos_ids", None)
    values["pooling"] = pooling_from_proto(message.pooling) or Pooling.NONE
    added = tuple((t.token_id, t.content) for t in message.grammar_tokens)
    values["grammar_tokens"] = GrammarTokens(added, tuple(message.grammar_eos_ids))
    values["sampling"] = sampling_params_from_proto(message.sampling)
    values["tenant"] = message.tenant
    values["cache_salt"] = message.cache_salt or message.tenant
    return WorkerRequest(**{"prompt_ids": (), **values})


def _given(request: GenerateRequest | WorkerRequest) -> Iterable[tuple[str, Any]]:
    """Names and values of the fields that are not None or empty."""
    kind: Any = type(request)
    for name in field_names(kind):
        if (value := getattr(request, name)) is not None and value != ():
            yield name, value


def _put(message: Message, name: str, value: object) -> None:
    """A number, a text or a list of them. Mutates: message."""
    try:
        if isinstance(value, list | tuple):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (ValueError, TypeError):
        raise InvalidRequest.field(name, value, "is out of range or of another type") from None


def _requested_adapters(
    messages: Iterable[inference_pb2.WeightedAdapter],
) -> tuple[RequestedAdapter, ...]:
    return tuple(
        RequestedAdapter(each.ref, each.weight if each.HasField("weight") else None)
        for each in messages
    )


def _adapter_set(messages: Iterable[worker_pb2.WorkerAdapter]) -> AdapterSet:
    return AdapterSet.of((each.digest, each.weight) for each in messages)


def _kept(messages: Iterable[worker_pb2.KeptPrefix]) -> tuple[KeptPrefix, ...]:
    return tuple(KeptPrefix(_adapter_set(each.adapters), each.num_tokens) for each in messages)


_UPDATE_POLICIES = {
    UpdatePolicy.FINISH: inference_pb2.UPDATE_POLICY_FINISH,
    UpdatePolicy.FOLLOW: inference_pb2.UPDATE_POLICY_FOLLOW,
    UpdatePolicy.FOLLOW_KEEP_PREFIX: inference_pb2.UPDATE_POLICY_FOLLOW_KEEP_PREFIX,
}
_UPDATE_POLICY_OF = {number: policy for policy, number in _UPDATE_POLICIES.items()}


def _update_policy(number: inference_pb2.UpdatePolicy) -> UpdatePolicy:
    """The policy of a field that is set, which is never unspecified."""
    if number not in _UPDATE_POLICY_OF:
        why = "is a policy that this version does not know"
        raise Unsupported.field("on_update", number, why)
    return _UPDATE_POLICY_OF[number]


_GENERATE_READERS: dict[str, Callable[[Any], object]] = {
    "sampling": sampling_from_proto,
    "adapters": _requested_adapters,
    "on_update": _update_policy,
}
_WORKER_READERS: dict[str, Callable[[Any], object]] = {
    "adapters": _adapter_set,
    "grammar": grammar_from_proto,
    "kept": _kept,
}
