"""Grammars that constrain calls within answers to the schemas, in the notation of the base.

Optional calls may occur within free text. If answers must also follow a schema, an answer is either
calls or such an answer. Required calls are the whole answer, after the reasoning if there is any.
The grammars are written in llguidance's Lark. A lazy rule ends at the first mark of a call, after
which only a call matches. A mark may be a single token, which that library excludes from plain
text, so the grammar accepts it both as a token and as characters.

Source of the idea: structural tags, as in xgrammar and llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from loraplex.api.sampling import Grammar
from loraplex.errors import InvalidRequest
from loraplex_services.gateway.text.chat_style import (
    CHANNEL,
    THINK,
    ChatStyle,
    ThoughtMarks,
    ToolFormat,
)
from loraplex_services.gateway.tools.call_schemas import (
    SPACING,
    argument,
    check_grammar_chars,
    list_of_calls,
    one_call,
)
from loraplex_services.gateway.tools.gemma_calls import QUOTE
from loraplex_services.gateway.tools.gemma_grammar import ANY_VALUE, gemma_body
from loraplex_services.gateway.tools.schema_keywords import properties_of, required_of
from loraplex_services.gateway.tools.tag_grammar import coder_body, glm_body
from loraplex_services.gateway.tools.thought_budget import ThoughtBudget, with_budget
from loraplex_services.gateway.tools.tool_use import ToolUse

FindToken = Callable[[str], int | None]
"""The id of an added token of the base's tokenizer, by its text."""

_RULES = r"""
TEXT: /(.|\n)*/
SPACE: /[ \t\r\n]{0,8}/
"""
_WHOLE_ANSWER = {ToolFormat.LLAMA3_JSON: "{", ToolFormat.PYTHONIC: r"\["}
"""Formats in which the first character decides whether an answer consists of calls or of text."""
_TEXT_TOKENS = (THINK.opens, THINK.closes, CHANNEL.opens, CHANNEL.closes)


def call_grammar(
    style: ChatStyle,
    use: ToolUse,
    answer: Grammar | None,
    find_token: FindToken,
    *,
    is_thinking: bool = False,
    budget: ThoughtBudget | None = None,
) -> Grammar | None:
    """The grammar of an answer; None if anything is allowed.

    Args:
        answer: JSON Schema of answers that are not calls; None = free text.
        is_thinking: the prompt ended inside a thought.
        budget: of the thought; None = no limit. Needs an `answer` of None.

    Raises: InvalidRequest for schemas that are too large or nested too deeply, Unsupported for a
    budget that cannot be kept.
    """
    if not use.tools and budget is None:
        return answer
    try:
        return _grammar(style, use, answer, find_token, is_thinking=is_thinking, budget=budget)
    except RecursionError:
        raise InvalidRequest.field("grammar", "", "a schema is nested too deeply") from None


def _grammar(
    style: ChatStyle,
    use: ToolUse,
    answer: Grammar | None,
    find_token: FindToken,
    *,
    is_thinking: bool,
    budget: ThoughtBudget | None,
) -> Grammar | None:
    writer = _Writer(style.tool_format, use, find_token)
    if use.must_call:
        marks = style.marks if (style.thinks or is_thinking) and budget is None else None
        start = writer.required(marks, is_thinking=is_thinking)
    elif style.tool_format is ToolFormat.NONE or (answer is None and not use.is_strict):
        if budget is None:
            return answer
        start = ""
    else:
        start = writer.free() if answer is None else writer.or_answer(answer)
    if budget is not None:
        start = with_budget(start, style, budget, find_token, is_thinking=is_thinking)
    return Grammar(ebnf=start + _RULES + "\n".join(writer.rules) + "\n")


class _Writer:
    """Builds one grammar."""

    def __init__(self, tool_format: ToolFormat, use: ToolUse, find_token: FindToken) -> None:
        self._format = tool_format
        self._use = use
        self._find_token = find_token
        self.rules: list[str] = []
        self._num_chars = 0

    def free(self) -> str:
        """The rules for text that may contain calls or end with them."""
        if self._format is ToolFormat.HARMONY:
            return self._messages(f"call | {self._header('final')} TEXT | TEXT")
        shown = self._tokens(*_TEXT_TOKENS, *self._outer_marks())
        before = f"(TEXT ({shown}))* " if shown else ""
        if self._format in _WHOLE_ANSWER:
            # What begins like a call does not count as text, nor as a thought: the longest lexeme
            # wins.
            self._add(rf"OTHER: /\s*([^\s{_WHOLE_ANSWER[self._format]}](.|\n)*)?/")
            before = before.replace("TEXT", "OTHER")
            return f"start: {before}(OTHER | SPACE calls SPACE)\ncalls: {self._whole_answer()}\n"
        body = self._body()
        marks = self._marks()
        self._rule("head[lazy]", f"TEXT ({' | '.join(json.dumps(mark) for mark in marks)})")
        tokens = self._tokens(*marks)
        heads = f"(head | TEXT ({tokens}))" if tokens else "head"
        closing = "".join(f"({self._either(mark)} SPACE)?" for mark in self._outer_marks()[1:])
        alone = f"{before}TEXT | call SPACE {closing}"
        rest = f"call* {before}TEXT" if self._use.is_parallel else alone
        return f"start: {rest}\ncall: {before}{heads} {body}\n"

    def or_answer(self, answer: Grammar) -> str:
        """The rules for an answer that is either calls or JSON of a schema."""
        schema = json.loads(answer.texts[0])
        self._rule("answer", f"%json {json.dumps(schema | SPACING)}")
        if self._format is ToolFormat.HARMONY:
            return self._messages(f"call | {self._header('final')} answer")
        return f"start: answer | calls\ncalls: {self._only_calls()}\n"

    def required(self, marks: ThoughtMarks | None, *, is_thinking: bool) -> str:
        """The rules for calls, after a thought if the base writes thoughts between marks."""
        if self._format is ToolFormat.HARMONY:
            return self._messages("call")
        thought = ""
        if marks is not None:
            thought = self._up_to(marks.closes, "thought") + " SPACE "
            if not is_thinking:
                title = json.dumps(marks.title)
                thought = f"(SPACE {self._either(marks.opens)} {title} {thought})? "
        return f"start: {thought}SPACE calls SPACE\ncalls: {self._only_calls()}\n"

    def _messages(self, last: str) -> str:
        """The rules for Harmony: thoughts and remarks, then a message that ends the answer."""
        text = self._up_to("<|end|>", "ended")
        asides = f"({self._header('analysis')} | {self._header('commentary')})"
        self._rule("aside", f'{asides} {text} {self._either("<|start|>")} "assistant"')
        channel, message = self._either("<|channel|>"), self._either("<|message|>")
        calls = []
        for index, (name, schema) in enumerate(self._use.schemas.items()):
            to = json.dumps(f" to=functions.{name}")
            self._json(f"arguments_{index}", schema)
            head = f'({to} {channel} "commentary" | {channel} "commentary" {to})'
            kind = f'(" "? {self._either("<|constrain|>")} "json" | " json")?'
            calls.append(f"{head} {kind} {message} arguments_{index}")
        self._rule("call", " | ".join(calls))
        return f"start: aside* ({last})\n"

    def _header(self, channel: str) -> str:
        """Harmony: the beginning of a message without a recipient."""
        marks = self._either("<|channel|>"), self._either("<|message|>")
        return f"{marks[0]} {json.dumps(channel)} {marks[1]}"

    def _only_calls(self) -> str:
        """The expression for an answer that consists of calls."""
        if self._format in _WHOLE_ANSWER or self._format is ToolFormat.NONE:
            return self._whole_answer()
        marks = " | ".join(self._either(mark) for mark in self._marks())
        if self._format is ToolFormat.QWEN3_CODER:
            outer, closing = (self._either(mark) for mark in self._outer_marks())
            marks, body = f"({outer} SPACE)? {marks}", f"{self._body()} (SPACE {closing})?"
        else:
            body = self._body()
        more = " (SPACE call)*" if self._use.is_parallel else ""
        self._rule("call", f"({marks}) {body}")
        return f"call{more}"

    def _marks(self) -> tuple[str, ...]:
        return {
            ToolFormat.HERMES: ("<tool_call>",),
            ToolFormat.MISTRAL: ("[TOOL_CALLS]",),
            ToolFormat.PHI4_MINI: ("<|tool_call|>", "functools"),
            ToolFormat.QWEN3_CODER: ("<function=",),
            ToolFormat.GLM: ("<tool_call>",),
            ToolFormat.GEMMA4: ("<|tool_call>",),
        }[self._format]

    def _outer_marks(self) -> tuple[str, ...]:
        """Optional marks around calls."""
        is_coder = self._format is ToolFormat.QWEN3_CODER
        return ("<tool_call>", "</tool_call>") if is_coder else ()

    def _body(self) -> str:
        """The grammar after a mark, in the notation of the base."""
        match self._format:
            case ToolFormat.HERMES:
                self._json("object", one_call(self._use.schemas, "arguments"))
                return f"SPACE object SPACE {self._either('</tool_call>')}"
            case ToolFormat.MISTRAL if self._find_token("[ARGS]") is not None:
                return self._named_calls()
            case ToolFormat.MISTRAL:
                self._list()
                return "SPACE list"
            case ToolFormat.PHI4_MINI:
                self._list()
                return f"SPACE list ({self._either('<|/tool_call|>')})?"
            case ToolFormat.GLM:
                return self._one_of(glm_body) + f" SPACE {self._either('</tool_call>')}"
            case ToolFormat.GEMMA4:
                self._rule("quote", self._either(QUOTE))
                self._rule("string", f"quote {self._up_to(QUOTE, 'quoted')}")
                self._add(ANY_VALUE)
                return f'"call:" {self._one_of(gemma_body)} {self._either("<tool_call|>")}'
            case _:
                return self._one_of(coder_body)

    def _one_of(self, body_of: Callable[[str, dict[str, Any], str], list[str]]) -> str:
        """Calls written as tags, one rule for each function."""
        names = []
        for index, (name, schema) in enumerate(self._use.schemas.items()):
            names.append(f"function_{index}")
            self._add(*body_of(name, schema, names[-1]))
        return f"({' | '.join(names)})"

    def _list(self) -> None:
        is_parallel = self._use.is_parallel
        self._json("list", list_of_calls(self._use.schemas, "arguments", is_parallel=is_parallel))

    def _named_calls(self) -> str:
        """`name[ARGS]{...}`, perhaps with an id between."""
        ids = self._tokens("[CALL_ID]")
        between = f"({ids} /[A-Za-z0-9]{{9}}/)? " if ids else ""
        args = self._tokens("[ARGS]")
        calls = []
        for index, (name, schema) in enumerate(self._use.schemas.items()):
            self._json(f"arguments_{index}", schema)
            calls.append(f"{json.dumps(name)} {between}{args} arguments_{index}")
        return f"({' | '.join(calls)})"

    def _whole_answer(self) -> str:
        """The expression for calls that need no mark, because they are the whole answer."""
        if self._format is ToolFormat.NONE:
            return self._own_notation()
        if self._format is ToolFormat.LLAMA3_JSON:
            self._json("object", one_call(self._use.schemas, "parameters"))
            tag = self._tokens("<|python_tag|>")
            more = " (/; ?/ object)*" if self._use.is_parallel else ""
            return (f"({tag})? " if tag else "") + "object" + more
        calls = []
        for index, (name, schema) in enumerate(self._use.schemas.items()):
            calls.append(f"call_{index}")
            self._rule(calls[-1], f'{json.dumps(name + "(")} {self._keywords(index, schema)} ")"')
        self._rule("python", " | ".join(calls))
        more = ' (", " python)*' if self._use.is_parallel else ""
        return f'"[" python{more} "]"'

    def _own_notation(self) -> str:
        """A list of calls, or the arguments of the one function that must be called."""
        if self._use.named:
            self._json("object", self._use.schemas[self._use.named])
            return "object"
        is_parallel = self._use.is_parallel
        self._json("list", list_of_calls(self._use.schemas, "parameters", is_parallel=is_parallel))
        return "list"

    def _keywords(self, index: int, schema: dict[str, Any]) -> str:
        """Arguments by name: required ones first, then optional ones, in the order of the
        schema."""
        required: list[str] = []
        optional: list[str] = []
        names = required_of(schema)
        for number, key in enumerate(properties_of(schema) or ()):
            rule = f"value_{index}_{number}"
            self._json(rule, argument(schema, key))
            is_required = key in names
            (required if is_required else optional).append(f"{json.dumps(key + '=')} {rule}")
        if required:
            first = ' ", " '.join(required)
            return first + "".join(f' (", " {each})?' for each in optional)
        starts = [
            each + "".join(f' (", " {later})?' for later in optional[number + 1 :])
            for number, each in enumerate(optional)
        ]
        return f"({' | '.join(starts)})?" if starts else ""

    def _up_to(self, mark: str, rule: str) -> str:
        """Text and the mark that ends it, which is a token or characters."""
        self._rule(f"{rule}[lazy]", f"TEXT {json.dumps(mark)}")
        tokens = self._tokens(mark)
        return f"({rule} | TEXT ({tokens}))" if tokens else rule

    def _either(self, mark: str) -> str:
        """A mark, as a single token or as characters."""
        token = self._tokens(mark)
        spelled = json.dumps(mark)
        return f"({token} | {spelled})" if token else spelled

    def _tokens(self, *texts: str) -> str:
        """The marks that are single tokens, as alternatives; "" if none is."""
        ids = (self._find_token(text) for text in texts)
        return " | ".join(f"<[{token_id}]>" for token_id in ids if token_id is not None)

    def _json(self, rule: str, schema: dict[str, Any]) -> None:
        self._rule(rule, f"%json {json.dumps(schema | SPACING)}")

    def _rule(self, name: str, body: str) -> None:
        self._add(f"{name}: {body}")

    def _add(self, *rules: str) -> None:
        """Raises: InvalidRequest as soon as the rules are too long."""
        self.rules += rules
        self._num_chars += sum(map(len, rules))
        check_grammar_chars(self._num_chars)
