"""Compiles a grammar and a tokenizer into a matcher, within limits on size, time and memory.

The library is llguidance, which supports every kind of grammar that is served and limits its own
work. It cannot limit the depth of its recursion, so the API server process first compiles an
unknown grammar in another process (see `check_process`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from loraplex.api.sampling import Grammar
from loraplex.errors import InvalidRequest, Unsupported

FORMS = ("json_schema", "regex", "ebnf", "choice")
MAX_GRAMMAR_BYTES = 128 << 10
"""Largest size in bytes of all texts of a grammar."""
MAX_OPTIONS = 4096
MAX_REASON_CHARS = 240

WHITESPACE = r"[ \t\n\r]{0,16}"
"""White space between the tokens of JSON. It is bounded, so that no model fills its context with
blanks."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""The beginning of a rule in GBNF, which no grammar in Lark's notation has."""

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def read_vocabulary(path: Path, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The tokens of `tokenizer.json` as the matcher sees them; this takes a second for large ones.

    Raises:
        Unsupported: the base has no tokenizer that grammars can be matched with.
    """
    if not path.is_file():
        _refuse_tokenizer("it has no tokenizer.json")
    if not eos_ids:
        _refuse_tokenizer("it has no end-of-sequence token in its vocabulary")
    try:
        return LLTokenizer(path.read_text("utf-8"), n_vocab=vocab_size, eos_token=list(eos_ids))
    except (OSError, ValueError) as error:
        _refuse_tokenizer(f"its tokenizer.json cannot be read: {_one_line(str(error))}")


def compile_grammar(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher at the start of the output. Its first mask has been computed, so it is known to
    work.

    Raises:
        InvalidRequest: naming the grammar, with the library's reason.
    """
    matcher = LLMatcher(vocabulary, _source(grammar), log_level=0, limits=LIMITS)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise bad_grammar(grammar, matcher.get_error())
    if not any(mask):
        raise bad_grammar(grammar, "no output satisfies it")
    return matcher


def in_lark(grammar: Grammar) -> Grammar:
    """The grammar in Lark's notation, if it is in GBNF; otherwise the grammar itself.

    Its processor time grows with the square of the number of rules, so only the process that checks
    grammars calls this. Raises InvalidRequest naming the grammar.
    """
    if grammar.ebnf is None or _GBNF_RULE.search(grammar.ebnf) is None:
        return grammar
    try:
        return Grammar(ebnf=gbnf_to_lark(grammar.ebnf))
    except RecursionError:
        raise bad_grammar(grammar, "it nests too deeply: simplify it") from None
    except Exception as error:  # the library's parser raises errors of any kind
        raise bad_grammar(grammar, f"it is not valid GBNF: {error}") from None


def check_size(grammar: Grammar) -> None:
    """Cheap checks before any compilation. Raises InvalidRequest naming the grammar."""
    if grammar.form not in FORMS:
        raise bad_grammar(grammar, f"set one of {', '.join(FORMS)}")
    if not grammar.texts:
        raise bad_grammar(grammar, "it has no options")
    if len(grammar.texts) > MAX_OPTIONS:
        raise bad_grammar(grammar, f"at most {MAX_OPTIONS} options")
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in grammar.texts)
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise bad_grammar(grammar, f"it has {num_bytes} bytes; send at most {MAX_GRAMMAR_BYTES}")


def bad_grammar(grammar: Grammar, reason: str) -> InvalidRequest:
    """The refusal of a grammar; its text is not repeated beyond what the reason quotes."""
    return InvalidRequest.field(
        "grammar", grammar.form, f"the {grammar.form} is refused: {_one_line(reason)}"
    )


def _source(grammar: Grammar) -> str:
    """The grammar in the library's own notation. Raises InvalidRequest."""
    match grammar.form:
        case "json_schema":
            schema = json.dumps(_schema(grammar))
            source = LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": WHITESPACE}
            )
        case "regex":
            source = LLMatcher.grammar_from_regex(grammar.texts[0])
        case "choice":
            source = LLMatcher.grammar_from_lark(_one_of(grammar.texts))
        case _:
            source = LLMatcher.grammar_from_lark(grammar.texts[0])
    return source


def _schema(grammar: Grammar) -> Any:
    try:
        schema = json.loads(grammar.texts[0], parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else "not valid JSON"
        raise bad_grammar(grammar, f"it is {what}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise bad_grammar(grammar, "a JSON Schema is an object")
    return schema


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _one_of(options: Sequence[str]) -> str:
    return "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options)


def _one_line(reason: str) -> str:
    """The line of a multi-line error message that names the problem, shortened."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason given"]
    said = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    line = (said or lines)[0]
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."


def _refuse_tokenizer(why: str) -> NoReturn:
    raise Unsupported.field("grammar", "set", f"this base cannot constrain output: {why}")
