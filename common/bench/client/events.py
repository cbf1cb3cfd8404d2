"""Reads answers as they arrive.

The client must not be what is measured: only the counted fields of an event are decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .answer import Answer, Drafted, Failure

_NULL = msgspec.Raw(b"null")


Read = Callable[[Answer, bytes, "float | None"], None]
"""``read(answer, data, now)`` adds an event that arrived at ``now``, or a whole answer (None). Raises Failure."""


class Reader:
    """Reads one answer's body: cuts a stream into the data of its events, one line each; gathers a whole answer."""

    def __init__(self, answer: Answer, read: Read, *, stream: bool):
        self._answer = answer
        self._read = read
        self._stream = stream
        self._rest = b""
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Read the next bytes of the body. Raises Failure."""
        if self._rest:
            data = self._rest + data
        if not self._stream:
            self._rest = data
            self._answer.last = now
            return
        begin = 0
        while (end := data.find(b"\n", begin)) >= 0:
            if end - begin > 5 and data.startswith(b"data:", begin):
                line = data[begin + 5:end].strip()
                if line == b"[DONE]":
                    self._done = True
                else:
                    self._decode(line, now)
            begin = end + 1
        self._rest = data[begin:]

    def end(self) -> None:
        """End the body; raises Failure where the answer is incomplete."""
        if self._stream and not self._done:
            raise Failure("broken stream", "The stream ended without its last event.")
        if not self._stream:
            self._decode(self._rest, None)

    def _decode(self, data: bytes, now: float | None) -> None:
        try:
            self._read(self._answer, data, now)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Failure("unreadable answer", f"{error}: {data[:200]!r}") from None


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    code: str | int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _OutputDetails | None = None

    def copy_to(self, answer: Answer) -> None:
        answer.num_prompt, answer.num_output = self.prompt_tokens, self.completion_tokens
        if self.prompt_tokens_details is not None:
            answer.num_cached = self.prompt_tokens_details.cached_tokens
        if self.completion_tokens_details is not None and self.completion_tokens is not None:
            answer.drafted = self.completion_tokens_details.drafted(self.completion_tokens)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    simulated_acceptance: bool = False

    def drafted(self, num_output: int) -> Drafted | None:
        """Returns the drafts of one choice with ``num_output`` tokens, the first of which is its prompt's; None without
        any."""
        accepted, rejected = self.accepted_prediction_tokens, self.rejected_prediction_tokens
        if accepted is None or rejected is None or accepted + rejected == 0:
            return None
        return Drafted(max(1, num_output - 1 - accepted), accepted + rejected, accepted,
                       simulated=self.simulated_acceptance)


def _refuse(error: _Error | str | None) -> None:
    """Raise Failure where the server sent an error in place of an answer."""
    if error is None:
        return
    if isinstance(error, str):
        raise Failure("error in the answer", error)
    raise Failure(f"error in the answer: {error.code or error.type or 'unknown'}", error.message or "")


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    spec_verify_ct: int | None = None
    spec_draft_token_num: int | None = None
    spec_accept_token_num: int | None = None
    spec_accept_histogram: list[int] = []
    spec_acceptance_simulated: bool = False
    finish_reason: msgspec.Raw = _NULL


class _Generated(msgspec.Struct):
    text: msgspec.Raw = _NULL
    output_ids: msgspec.Raw = _NULL
    meta_info: _Meta | None = None
    error: _Error | str | None = None


_generated = msgspec.json.Decoder(_Generated)


def read_generate(answer: Answer, data: bytes, now: float | None) -> None:
    """Each event holds the whole answer so far; its text is decoded once, at the end."""
    event = _generated.decode(data)
    _refuse(event.error)
    meta = event.meta_info or _Meta()
    before, count = answer.num_output, meta.completion_tokens
    if now is not None and (count is None or count > (before or 0)):
        answer.record_event(now)
    answer.num_output = count
    if bytes(meta.finish_reason) == b"null":
        return
    reason = msgspec.json.decode(meta.finish_reason)
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise Failure("aborted", str(reason.get("message", "The server aborted the request.")))
    answer.num_prompt, answer.num_cached = meta.prompt_tokens, meta.cached_tokens
    if meta.spec_verify_ct:
        answer.drafted = Drafted(meta.spec_verify_ct, meta.spec_draft_token_num or 0, meta.spec_accept_token_num or 0,
                                 meta.spec_accept_histogram, meta.spec_acceptance_simulated)
    answer.text = msgspec.json.decode(event.text) or ""
    answer.ids = msgspec.json.decode(event.output_ids) or ()


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_completion = msgspec.json.Decoder(_Completion)


def read_completion(answer: Answer, data: bytes, now: float | None) -> None:
    event = _completion.decode(data)
    _refuse(event.error)
    for choice in event.choices:
        # A token whose text is incomplete or hidden arrives as an empty text.
        if now is not None and (choice.text or choice.finish_reason is None):
            answer.record_event(now)
        answer.text += choice.text or ""
    if event.usage is not None:
        event.usage.copy_to(answer)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _ChatChoice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None


class _Chat(msgspec.Struct):
    choices: list[_ChatChoice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_chat = msgspec.json.Decoder(_Chat)


def read_chat(answer: Answer, data: bytes, now: float | None) -> None:
    event = _chat.decode(data)
    _refuse(event.error)
    for choice in event.choices:
        message = choice.delta or choice.message
        if message is None:
            continue
        if now is not None and (message.content or message.reasoning_content or message.reasoning
                                or message.tool_calls):
            answer.record_event(now)
        answer.text += message.content or ""
    if event.usage is not None:
        event.usage.copy_to(answer)
