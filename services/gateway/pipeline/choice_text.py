"""The text of one choice: tokens in, pieces out; stop strings and half characters held back."""

from __future__ import annotations

from services.gateway.pipeline.stop import StopScanner
from services.gateway.request import FinishReason, Piece, TextRules, Tokens
from services.gateway.text.detokenize import TokenBytes


class ChoiceText:
    """Turns the tokens of one choice into pieces. The last piece has a finish reason."""

    def __init__(self, index: int, tokens: TokenBytes, rules: TextRules) -> None:
        self._index = index
        self._rules = rules
        self._detokenizer = tokens.detokenizer(skip_special=rules.skip_special)
        self._scanner = StopScanner(rules.stop, include=rules.include_stop)
        self._num_chars = 0
        self.num_tokens = 0
        """Tokens in pieces so far; those after a stop string never count."""

    def add(self, event: Tokens, stop_token_ids: tuple[int, ...] = ()) -> Piece:
        """The piece for an event; a matched stop string ends the choice early."""
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
        return self._piece(event, "".join(shown), tuple(offsets), matched, stop_token_ids)

    def _push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        self._num_chars += len(text)
        return text

    def _hides_last(self, event: Tokens) -> bool:
        """The EOS or stop id that ended a choice is no part of its text; a finished grammar has
        none."""
        return event.stop_token_id is not None and not self._rules.include_stop

    def _scan(self, text: str, shown: list[str]) -> str | None:
        """Mutates: shown, num_tokens."""
        self.num_tokens += 1
        if self.num_tokens <= self._rules.min_tokens:
            shown.append(text)
            return None
        scan = self._scanner.push(text)
        shown.append(scan.text)
        return scan.matched

    def _finish(self, shown: list[str]) -> str | None:
        """Let out what was held back; even that may complete a stop string. Mutates: shown."""
        scan = self._scanner.push(self._detokenizer.flush())
        shown.append(scan.text)
        if scan.matched is None:
            shown.append(self._scanner.flush())
        return scan.matched

    def _piece(
        self,
        event: Tokens,
        text: str,
        offsets: tuple[int, ...],
        matched: str | None,
        stop_token_ids: tuple[int, ...],
    ) -> Piece:
        num_kept = len(offsets)
        finish_reason = event.finish_reason
        stop_reason: str | int | None = _stop_id(event, stop_token_ids)
        if matched is not None:
            finish_reason, stop_reason = FinishReason.STOP, matched
        return Piece(
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
            pooled=event.pooled,
        )


def _stop_id(event: Tokens, stop_token_ids: tuple[int, ...]) -> int | None:
    """The id to name as reason: one the caller listed; plain EOS is no news."""
    return event.stop_token_id if event.stop_token_id in stop_token_ids else None
