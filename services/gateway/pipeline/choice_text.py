"""Turns the tokens of one choice into text; holds back partial stop strings and characters."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.api.output import FinishReason, RoutedExperts, WeightSpan
from loraplex_services.gateway.request import TextDelta, TextRules, Tokens
from loraplex_services.gateway.text.detokenize import TokenBytes


@dataclass(frozen=True, slots=True)
class Scan:
    """Text that may be sent, and the stop string that was matched, if any."""

    text: str
    matched: str | None = None


class StopScanner:
    """Finds the first stop string in growing text and never emits a part of one.

    The result depends on the text only, not on how it was split: the stop string that is complete
    first wins, and the longest of several that are complete at the same character.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        """`stops` are non-empty; with `include` the matched one is part of the text."""
        assert all(stops), "empty stop string"
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> Scan:
        """Add text. After a match nothing more must be pushed.

        Without `may_stop`, no stop string is complete in this text, but one may begin in it.
        """
        if not self._stops:
            return Scan(text)
        buffer = self._held + text
        match = self._first_match(buffer, len(self._held)) if may_stop else None
        if match is not None:
            end, start = match
            self._held = ""
            return Scan(buffer[: end if self._include else start], buffer[start:end])
        cut = len(buffer) - self._held_back(buffer)
        self._held = buffer[cut:]
        return Scan(buffer[:cut])

    def flush(self) -> str:
        """The text still held back at the end."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, int] | None:
        """(end, start) of the match that ends first, then starts first, of those that end after
        the first `num_old` characters."""
        matches = []
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start))
        return min(matches, default=None)

    def _held_back(self, buffer: str) -> int:
        """Length of the longest suffix of the buffer that is a prefix of a stop string."""
        longest = min(len(buffer), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class ChoiceText:
    """Turns the tokens of one choice into text deltas; the last one has a finish reason."""

    def __init__(self, index: int, tokens: TokenBytes, rules: TextRules) -> None:
        self._index = index
        self._rules = rules
        self._detokenizer = tokens.detokenizer(skip_special=rules.skip_special)
        self._scanner = StopScanner(rules.stop, include=rules.include_stop)
        self._num_chars = 0
        self.num_tokens = 0
        """Tokens emitted so far; those after a stop string do not count."""

    def add(self, event: Tokens, stop_token_ids: tuple[int, ...] = ()) -> TextDelta:
        """The text delta for an event; a matched stop string ends the choice early."""
        shown: list[str] = []
        offsets: list[int] = []
        matched: str | None = None
        for token_id in event.token_ids:
            offsets.append(self._num_chars)
            is_last = len(offsets) == len(event.token_ids)
            text = "" if is_last and self._hides_last(event) else self._push(token_id)
            matched = self._scan(text, shown)
            if matched is not None:
                break
        if matched is None and event.finish_reason is not None:
            matched = self._finish(shown)
        return self._text_delta(event, "".join(shown), tuple(offsets), matched, stop_token_ids)

    def _push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        self._num_chars += len(text)
        return text

    def _hides_last(self, event: Tokens) -> bool:
        """Whether the last token is left out of the text: the EOS or stop id that ended the choice.

        A choice that ended because its grammar was complete has no such token.
        """
        return event.stop_token_id is not None and not self._rules.include_stop

    def _scan(self, text: str, shown: list[str]) -> str | None:
        """Mutates: shown, num_tokens."""
        self.num_tokens += 1
        scan = self._scanner.push(text, may_stop=self._may_stop)
        shown.append(scan.text)
        return scan.matched

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens > self._rules.min_tokens

    def _finish(self, shown: list[str]) -> str | None:
        """Release what was held back, which may complete a stop string. Mutates: shown."""
        scan = self._scanner.push(self._detokenizer.flush(), may_stop=self._may_stop)
        shown.append(scan.text)
        if scan.matched is None:
            shown.append(self._scanner.flush())
        return scan.matched

    def _text_delta(
        self,
        event: Tokens,
        text: str,
        offsets: tuple[int, ...],
        matched: str | None,
        stop_token_ids: tuple[int, ...],
    ) -> TextDelta:
        num_kept = len(offsets)
        finish_reason = event.finish_reason
        stop_reason: str | int | None = _stop_id(event, stop_token_ids)
        if matched is not None:
            finish_reason, stop_reason = FinishReason.STOP, matched
        return TextDelta(
            index=self._index,
            text=text,
            token_ids=event.token_ids[:num_kept],
            logprobs=event.logprobs[:num_kept],
            offsets=offsets,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=event.prompt_logprobs,
            cached_tokens=event.cached_tokens,
            timings=event.timings,
            worker_id=event.worker_id,
            spans=(WeightSpan(event.position, num_kept, event.digests),) if num_kept else (),
            pooled=event.pooled,
            routed_experts=_experts_of(event, num_kept),
        )


def _experts_of(event: Tokens, num_kept: int) -> RoutedExperts | None:
    """The experts that belong to an event's first tokens."""
    routed, num_cut = event.routed_experts, len(event.token_ids) - num_kept
    return routed.between(routed.start, routed.end - num_cut) if routed and num_cut else routed


def _stop_id(event: Tokens, stop_token_ids: tuple[int, ...]) -> int | None:
    """The stop id to report: one that the caller listed, but not plain EOS."""
    return event.stop_token_id if event.stop_token_id in stop_token_ids else None
