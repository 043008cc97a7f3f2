"""Converts the types of `loraplex.api` to and from their protobuf messages.

`to_message` and `from_message` convert a type whose fields have the names of its message. Every
other type has two functions here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from loraplex.api.fields import field_names, same_fields
from loraplex.api.load import ModelLoad, RecentLoad
from loraplex.api.output import (
    Candidate,
    FinishReason,
    RoutedExperts,
    RoutingShape,
    TokenLogprob,
)
from loraplex.api.pooling import Pooling
from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex.api.sampling import Grammar, Sampling, SamplingParams
from loraplex.errors import InvalidRequest, Violation
from loraplex.v1 import admin_pb2, common_pb2, inference_pb2, worker_pb2

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
_FINISH_REASON_OF = {number: reason for reason, number in _FINISH_REASONS.items()}
_POOLINGS = {
    Pooling.DEFAULT: common_pb2.POOLING_UNSPECIFIED,
    Pooling.NONE: common_pb2.POOLING_UNSPECIFIED,
    Pooling.LAST: common_pb2.POOLING_LAST,
    Pooling.MEAN: common_pb2.POOLING_MEAN,
    Pooling.HEAD: common_pb2.POOLING_HEAD,
}
# The last of the two that are unspecified counts: NONE.
_POOLING_OF = {number: pooling for pooling, number in _POOLINGS.items()}


def violations_to_proto(violations: Iterable[Violation]) -> list[common_pb2.FieldViolation]:
    """Violations or warnings as messages."""
    return [
        common_pb2.FieldViolation(field=v.field, value=v.value, description=v.description)
        for v in violations
    ]


def violations_from_proto(
    messages: Iterable[common_pb2.FieldViolation],
) -> tuple[Violation, ...]:
    """The inverse."""
    return tuple(Violation(v.field, v.value, v.description) for v in messages)


def sampling_to_proto(sampling: Sampling) -> inference_pb2.SamplingParams:
    """The fields of a request that are not None.

    Raises:
        InvalidRequest: it names the field whose value the message cannot hold.
    """
    message = inference_pb2.SamplingParams()
    for name in field_names(Sampling):
        value = getattr(sampling, name)
        if value is None:
            continue
        if isinstance(value, Grammar):
            value = grammar_to_proto(value)
        try:
            message.MergeFrom(inference_pb2.SamplingParams(**{name: value}))
        except (ValueError, TypeError):
            raise InvalidRequest.field(
                name, value, "is out of range or of another type; see Sampling"
            ) from None
    return message


def sampling_from_proto(message: inference_pb2.SamplingParams) -> Sampling:
    """The inverse. A number without presence means the default if it is 0."""
    return Sampling(**set_fields(message, {"logit_bias": dict, "grammar": grammar_from_proto}))


def sampling_params_to_proto(params: SamplingParams) -> worker_pb2.WorkerSampling:
    """Resolved parameters for a worker."""
    values = same_fields(params, SamplingParams)
    values["logit_bias"] = dict(params.logit_bias)
    values["bad_sequences"] = [
        worker_pb2.TokenSequence(ids=sequence) for sequence in params.bad_sequences
    ]
    return worker_pb2.WorkerSampling(**values)


def sampling_params_from_proto(message: worker_pb2.WorkerSampling) -> SamplingParams:
    """The inverse. The pairs of `logit_bias` are sorted; a field that is 0 has its default."""
    given = set_fields(
        message,
        {
            "logit_bias": lambda biases: tuple(sorted(biases.items())),
            "bad_sequences": lambda sequences: tuple(tuple(each.ids) for each in sequences),
        },
    )
    return SamplingParams(**{"max_tokens": 0, "seed": 0, **given})


def to_message(record: Any, kind: type[M], /, **others: object) -> M:
    """A message with the values of a dataclass that it has under the same names. `others` are
    further fields, or values that replace those of the record."""
    names = _shared_names(kind.DESCRIPTOR, record.__class__)
    return kind(**{name: getattr(record, name) for name, _ in names} | others)


def from_message(message: Message, kind: Callable[..., T], /, **others: object) -> T:
    """The inverse. Lists are tuples and maps are dictionaries by key; the messages in them stay
    messages."""
    values = {
        name: getattr(message, name) if copy is None else copy(getattr(message, name))
        for name, copy in _shared_names(message.DESCRIPTOR, kind)
    }
    return kind(**values | others)


@functools.cache
def _shared_names(
    descriptor: Descriptor, kind: Any
) -> tuple[tuple[str, Callable[[Any], object] | None], ...]:
    """Each shared name, and the function that copies its value; None = it needs no copy."""
    known = descriptor.fields_by_name
    return tuple((name, _copier(known[name])) for name in field_names(kind) if name in known)


def _copier(field: FieldDescriptor) -> Callable[[Any], object] | None:
    if not field.is_repeated:
        return None
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    return _by_key if is_map else tuple


def _by_key(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """A map of a message, ordered by key: its own order differs from process to process."""
    return dict(sorted(values.items()))


def set_fields(message: Message, readers: Mapping[str, Callable[[Any], object]]) -> dict[str, Any]:
    """Values of the fields that are set, by name. Repeated fields without a reader are tuples."""
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        read = readers.get(field.name) or (tuple if field.is_repeated else None)
        values[field.name] = value if read is None else read(value)
    return values


def grammar_to_proto(grammar: Grammar) -> common_pb2.Grammar:
    """A grammar of one form.

    Raises:
        InvalidRequest: none or several of its fields are set.
    """
    if not grammar.form:
        raise InvalidRequest.field(
            "grammar",
            ", ".join(grammar.forms) or "nothing",
            "set exactly one of json_schema, regex, ebnf and choice",
        )
    if grammar.form == "choice":
        return common_pb2.Grammar(choice=common_pb2.GrammarChoice(options=grammar.texts))
    form: dict[str, Any] = {grammar.form: grammar.texts[0]}
    return common_pb2.Grammar(**form)


def grammar_from_proto(message: common_pb2.Grammar) -> Grammar:
    """The inverse; a message without a form becomes a grammar without one."""
    form = message.WhichOneof("form")
    if form is None:
        return Grammar()
    if form == "choice":
        return Grammar(choice=tuple(message.choice.options))
    given: dict[str, Any] = {form: getattr(message, form)}
    return Grammar(**given)


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason:
    """None is unspecified: the choice is still growing."""
    if reason is None:
        return common_pb2.FINISH_REASON_UNSPECIFIED
    return _FINISH_REASONS[reason]


def finish_reason_from_proto(number: common_pb2.FinishReason) -> FinishReason | None:
    """The inverse."""
    return _FINISH_REASON_OF.get(number)


def logprob_to_proto(logprob: TokenLogprob | None) -> common_pb2.TokenLogprob:
    """One position; None becomes an empty message."""
    if logprob is None:
        return common_pb2.TokenLogprob()
    return common_pb2.TokenLogprob(
        token=common_pb2.TokenCandidate(token_id=logprob.token_id, logprob=logprob.logprob),
        top=[common_pb2.TokenCandidate(token_id=i, logprob=value) for i, value in logprob.top],
        rank=logprob.rank,
    )


def logprobs_from_proto(messages: Iterable[common_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """The logprobs of output tokens."""
    return tuple(map(_logprob, messages))


def prompt_logprobs_from_proto(
    messages: Iterable[common_pb2.TokenLogprob],
) -> tuple[TokenLogprob | None, ...]:
    """The logprobs of a prompt, whose first token has none."""
    return tuple(map(_prompt_logprob, messages))


def routed_experts_to_proto(routed: RoutedExperts) -> common_pb2.RoutedExperts:
    """The experts of some tokens as a message."""
    shape = same_fields(routed.routing, RoutingShape)
    return common_pb2.RoutedExperts(start=routed.start, experts=routed.experts, **shape)


def routed_experts_from_proto(message: common_pb2.RoutedExperts) -> RoutedExperts:
    """The inverse."""
    routing = from_message(message, RoutingShape)
    return RoutedExperts(message.start, routing, message.experts)


def _prompt_logprob(message: common_pb2.TokenLogprob) -> TokenLogprob | None:
    return _logprob(message) if message.HasField("token") else None


def _logprob(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        message.token.token_id,
        message.token.logprob,
        tuple(Candidate(top.token_id, top.logprob) for top in message.top),
        message.rank,
    )


def pooling_to_proto(pooling: Pooling) -> common_pb2.Pooling:
    """NONE and DEFAULT are both unspecified: requests for text and for vectors differ otherwise."""
    return _POOLINGS[pooling]


def pooling_from_proto(number: common_pb2.Pooling) -> Pooling | None:
    """The inverse: NONE for unspecified, None for a pooling that this build does not know."""
    return _POOLING_OF.get(number)


_TIERS = {
    Tier.NONE: worker_pb2.ADAPTER_TIER_UNSPECIFIED,
    Tier.DISK: worker_pb2.ADAPTER_TIER_DISK,
    Tier.HOST: worker_pb2.ADAPTER_TIER_DISK,
    Tier.LOADING: worker_pb2.ADAPTER_TIER_LOADING,
    Tier.DEVICE: worker_pb2.ADAPTER_TIER_DEVICE,
}
"""Peers without the tier HOST read it as DISK; `host_bytes` says which of the two it is."""
_TIER_OF = {number: tier for tier, number in _TIERS.items() if tier is not Tier.HOST}


def residency_to_proto(residency: AdapterResidency) -> worker_pb2.AdapterResidency:
    """Where an adapter is, as a message."""
    return to_message(residency, worker_pb2.AdapterResidency, tier=_TIERS[residency.tier])


def residency_from_proto(message: worker_pb2.AdapterResidency) -> AdapterResidency:
    """The inverse."""
    is_on_host = message.tier == worker_pb2.ADAPTER_TIER_DISK and message.host_bytes > 0
    tier = Tier.HOST if is_on_host else _TIER_OF[message.tier]
    return from_message(message, AdapterResidency, tier=tier)


def load_to_proto(load: WorkerLoad) -> worker_pb2.WorkerLoad:
    """How busy a worker is, as a message."""
    return to_message(load, worker_pb2.WorkerLoad, full=load.is_full)


def load_from_proto(message: worker_pb2.WorkerLoad) -> WorkerLoad:
    """The inverse."""
    return from_message(message, WorkerLoad, is_full=message.full)


def recent_load_to_proto(load: RecentLoad) -> admin_pb2.RecentLoad:
    """The load of a gateway as a message."""
    return admin_pb2.RecentLoad(**dataclasses.asdict(load))


def recent_load_from_proto(message: admin_pb2.RecentLoad) -> RecentLoad:
    """The inverse."""
    models = tuple(from_message(each, ModelLoad) for each in message.models)
    return from_message(message, RecentLoad, models=models)
