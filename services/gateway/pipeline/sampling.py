"""Resolves requested sampling parameters for a worker: defaults, ranges and limits.

Every refusal names the field, shows the value and explains what to send instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from loraplex.api.sampling import RANGES, Grammar, GrammarTokens, Range, Sampling, SamplingParams
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.common.limits import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CANDIDATES,
    MAX_GRAMMAR_CHARS,
    MAX_PROMPT_LOGPROBS,
    MAX_TOKEN_IDS_PER_FIELD,
)
from loraplex_services.gateway.request import ServedModel, TextRules
from loraplex_services.gateway.text.tokenizer import CONTEXT_LENGTH_EXCEEDED

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_BYTES = 256
_SEED_MASK = (1 << 64) - 1
_INT32_MAX = (1 << 31) - 1
_SCALES = Range(-1000.0, 1000.0)
_BIASES = Range(-100.0, 100.0)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)} | {
    "temperature": 1.0
}
"""Values for what neither the request nor the base's generation_config.json sets."""


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """All parameters of one prompt, resolved."""

    sampling: SamplingParams
    text: TextRules
    num_choices: int
    echo: bool
    scale: float
    emits_tokens: bool
    """False with max_tokens 0: the prompt is echoed, nothing is generated."""


def resolve(
    requested: Sampling,
    base: ServedModel,
    num_prompt_tokens: int,
    bad_words: Iterable[tuple[int, ...]] = (),
    *,
    fills_context: bool,
    draw_seed: Callable[[], int],
) -> ResolvedSampling:
    """Check every field and fill in what is unset.

    Args:
        bad_words: the tokens of `requested.bad_words`, which were checked before.
        fills_context: chat: without max_tokens the rest of the context may be generated.
        draw_seed: gives the seed, in 0..2**64-1, when the request has none.

    Raises: InvalidRequest.
    """
    check_grammar(requested.grammar)
    max_tokens = _max_tokens(requested, base, num_prompt_tokens, fills_context)
    words = tuple(bad_words)
    _check_word_tokens(words)
    sampling = _sampling(requested, base, max_tokens, draw_seed, words)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest.field(
            "min_tokens", sampling.min_tokens, f"must be at most max_tokens ({max_tokens})"
        )
    num_choices = _integer("n", requested.n, 1, 1, MAX_CHOICES)
    if sampling.prompt_logprobs is not None:
        _check_prompt_logprobs(sampling.prompt_logprobs, num_prompt_tokens, num_choices)
    return ResolvedSampling(
        sampling=sampling,
        text=TextRules(
            _stops(requested.stop),
            requested.include_stop_str_in_output,
            requested.skip_special_tokens is not False,
            sampling.min_tokens,
        ),
        num_choices=num_choices,
        echo=requested.echo,
        scale=_within(_SCALES, "scale", 1.0 if requested.scale is None else requested.scale),
        emits_tokens=max_tokens > 0,
    )


def _check_prompt_logprobs(num_top: int, num_prompt_tokens: int, num_choices: int) -> None:
    """Limit the logprobs of a prompt, which a worker sends in one message. Raises:
    InvalidRequest."""
    num_entries = num_prompt_tokens * (1 + num_top) * num_choices
    if num_entries > MAX_PROMPT_LOGPROBS:
        why = (
            f"{num_prompt_tokens} tokens, {num_top} candidates for each and n = {num_choices} "
            f"make {num_entries} logprobs; ask for at most {MAX_PROMPT_LOGPROBS}"
        )
        raise InvalidRequest.field("prompt_logprobs", num_top, why)


def check_grammar(grammar: Grammar | None) -> None:
    """Check only its size: the worker knows the language and refuses what it cannot read.

    Raises: InvalidRequest.
    """
    if grammar is None:
        return
    if not grammar.form:
        raise InvalidRequest.field("grammar", "", "set json_schema, regex, ebnf or choice")
    num_chars = sum(map(len, grammar.texts))
    if num_chars > MAX_GRAMMAR_CHARS:
        raise InvalidRequest.field(
            "grammar",
            grammar.form,
            f"it has {num_chars} characters; send at most {MAX_GRAMMAR_CHARS}",
        )


def check_grammar_tokens(grammar: Grammar | None, tokens: GrammarTokens) -> None:
    """Limit the tokens of an adapter under a grammar: each choice of a request carries them all,
    and looks at them in every step. Raises: Unsupported.
    """
    num_tokens = len(tokens.added)
    if grammar is not None and num_tokens > MAX_TOKEN_IDS_PER_FIELD:
        why = (
            f"the adapter adds {num_tokens} tokens, and output is constrained with at most "
            f"{MAX_TOKEN_IDS_PER_FIELD}; send the request without a grammar"
        )
        raise Unsupported.field("grammar", grammar.form, why)


def check_bad_words(words: Sequence[str]) -> None:
    """Check words before they are tokenized. Raises: InvalidRequest."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest.field("bad_words", len(words), f"at most {MAX_BAD_WORDS} words")
    for index, word in enumerate(words):
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            why = f"word {index} is blank or longer than {MAX_BAD_WORD_CHARS} characters"
            raise InvalidRequest.field("bad_words", "", why)


def _check_word_tokens(words: Sequence[Sequence[int]]) -> None:
    """Limit their tokens: each choice of a request carries them all, and looks at them in every
    step. Raises: InvalidRequest.
    """
    num_tokens = sum(map(len, words))
    if num_tokens > MAX_TOKEN_IDS_PER_FIELD:
        why = (
            f"the words, each with and without a space before it, have {num_tokens} tokens; at "
            f"most {MAX_TOKEN_IDS_PER_FIELD}"
        )
        raise InvalidRequest.field("bad_words", "", why)


def _sampling(
    requested: Sampling,
    base: ServedModel,
    max_tokens: int,
    draw_seed: Callable[[], int],
    bad_words: Sequence[tuple[int, ...]],
) -> SamplingParams:
    defaults = base.default_sampling
    prompt_logprobs = requested.prompt_logprobs
    if requested.echo and requested.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = requested.logprobs
    return SamplingParams(
        max_tokens=max(max_tokens, 1),
        seed=_seed(requested.seed, draw_seed),
        min_tokens=_integer("min_tokens", requested.min_tokens, 0, 0, _INT32_MAX),
        top_k=_top_k(requested.top_k, defaults),
        stop_token_ids=_ids("stop_token_ids", requested.stop_token_ids, base),
        ignore_eos=requested.ignore_eos,
        logit_bias=_logit_bias(requested.logit_bias, base),
        logprobs=_logprobs("logprobs", requested.logprobs, MAX_LOGPROBS),
        logprob_token_ids=_logprob_token_ids(requested, base),
        prompt_logprobs=_logprobs("prompt_logprobs", prompt_logprobs, MAX_CANDIDATES),
        allowed_token_ids=_ids("allowed_token_ids", requested.allowed_token_ids, base),
        bad_token_ids=(
            *_ids("bad_token_ids", requested.bad_token_ids, base),
            *(word[0] for word in bad_words if len(word) == 1),
        ),
        bad_sequences=tuple(word for word in bad_words if len(word) > 1),
        **_numbers(requested, base.default_sampling),
    )


def _numbers(requested: Sampling, defaults: Mapping[str, float]) -> dict[str, Any]:
    """The parameters that have a range."""
    values: dict[str, Any] = {}
    for name, limits in RANGES.items():
        given = getattr(requested, name)
        value = defaults.get(name, _DEFAULTS[name]) if given is None else given
        values[name] = _within(limits, name, value)
    return values


def _within(limits: Range, field: str, value: float) -> float:
    if fault := limits.fault(value):
        raise InvalidRequest.field(field, value, fault)
    return value


def _max_tokens(
    requested: Sampling, base: ServedModel, num_prompt_tokens: int, fills_context: bool
) -> int:
    space_left = base.max_model_len - num_prompt_tokens
    given = requested.max_tokens
    if given is not None and (given < 0 or (given == 0 and not requested.echo)):
        raise InvalidRequest.field(
            "max_tokens", given, "must be at least 1 (0 only together with echo)"
        )
    # OpenAI's wording, by which client libraries recognise this case.
    length = f"this model's maximum context length is {base.max_model_len}"
    if space_left < (0 if given == 0 else 1):
        why = f"{length} tokens and the prompt has {num_prompt_tokens}; shorten the prompt"
        raise InvalidRequest.field("prompt", "", why, reason=CONTEXT_LENGTH_EXCEEDED)
    if given is None:
        return space_left if fills_context else min(DEFAULT_MAX_TOKENS, space_left)
    if given > space_left:
        why = (
            f"{length} tokens: {num_prompt_tokens} of the prompt and max_tokens {given} exceed it; "
            f"at most {space_left} fit"
        )
        raise InvalidRequest.field("max_tokens", given, why, reason=CONTEXT_LENGTH_EXCEEDED)
    return given


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest.field("stop", len(stops), f"at most {MAX_STOPS} stop strings")
    for index, stop in enumerate(stops):
        num_bytes = len(stop.encode("utf-8", "surrogatepass"))
        if not 1 <= num_bytes <= MAX_STOP_BYTES:
            raise InvalidRequest.field(
                "stop", "", f"string {index} has {num_bytes} bytes; send 1 to {MAX_STOP_BYTES}"
            )
    return tuple(stops)


def _seed(seed: int | None, draw: Callable[[], int]) -> int:
    if seed is None:
        return draw()
    if not -(1 << 63) <= seed <= _SEED_MASK:
        raise InvalidRequest.field("seed", seed, "must be a 64-bit integer")
    return seed & _SEED_MASK


def _top_k(value: int | None, defaults: Mapping[str, float]) -> int:
    if value == -1:
        return 0
    return _integer("top_k", value, int(defaults.get("top_k", 0)), 0, _INT32_MAX)


def _logprobs(field: str, value: int | None, most: int) -> int | None:
    return None if value is None else _integer(field, value, 0, 0, most)


def _logprob_token_ids(requested: Sampling, base: ServedModel) -> tuple[int, ...]:
    field = "logprob_token_ids"
    token_ids = _ids(field, requested.logprob_token_ids, base)
    if token_ids and requested.logprobs is None:
        raise InvalidRequest.field(field, len(token_ids), "needs logprobs")
    if len(token_ids) > MAX_LOGPROBS:
        raise InvalidRequest.field(field, len(token_ids), f"at most {MAX_LOGPROBS} token ids")
    return token_ids


def _logit_bias(biases: Mapping[int, float], base: ServedModel) -> tuple[tuple[int, float], ...]:
    _ids("logit_bias", biases, base)
    for bias in biases.values():
        _within(_BIASES, "logit_bias", bias)
    return tuple(biases.items())


def _ids(field: str, ids: Iterable[int], base: ServedModel) -> tuple[int, ...]:
    """Each id once, in the order of the request: workers look at all of them in every step."""
    checked = tuple(dict.fromkeys(ids))
    if len(checked) > MAX_TOKEN_IDS_PER_FIELD:
        raise InvalidRequest.field(
            field, len(checked), f"at most {MAX_TOKEN_IDS_PER_FIELD} token ids"
        )
    for token_id in checked:
        if why := base.refusal_of(token_id):
            raise InvalidRequest.field(field, token_id, f"token id {token_id} {why}")
    return checked


def _integer(field: str, value: int | None, default: int, least: int, most: int) -> int:
    number = default if value is None else value
    if not least <= number <= most:
        raise InvalidRequest.field(field, number, f"must be an integer from {least} to {most}")
    return number
