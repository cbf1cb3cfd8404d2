"""A text completion in the structs of ``/v1/completions``, in full or as chunks."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from ...api.messages import Logprobs
from ..context.generation import Choice, usage_of
from ..context.serving_context import ServingContext
from ..protocol.answer_metadata import AnswerMetadata
from ..protocol.continuation import ResponseHeader
from ..protocol.logprobs import completion_logprobs, joined
from ..protocol.row_extras import last_state
from ..protocol.usage import SglExt, Usage
from .best_of import best
from .echo import Echo
from .schema import Completion, CompletionChoice, CompletionRequest


class CompletionFormatter:
    """Formats one text completion, see ``respond.ResponseFormatter``."""

    def __init__(self, context: ServingContext, body: CompletionRequest, echo: Echo | None, *, with_ids: bool):
        self._id, self._created, self._model = ResponseHeader.of(body, "cmpl-", context.model.name)
        self._reports_cached = context.config.answers.enable_cache_report
        self._hidden_size = context.model.spec.hidden_size
        self._with_ids = with_ids or bool(body.return_token_ids)
        self._body = body
        self._echo = echo
        self._token_bytes = context.status.serving_tokenizer().token_bytes
        self._text_offsets: list[int] = []  # of each choice's next token, for logprobs
        self._pending_ids: list[list[int]] = []  # ids of each choice's tokens whose text is buffered

    def full(self, choices: Sequence[Choice]) -> Completion:
        usage = self._usage(choices)
        prompts = {choice.rid: self._echo.text(choice) for choice in choices} if self._echo else {}
        chosen = best(choices, self._body.num_generated, self._body.num_choices)
        formatted = [self._choice(choice, prompts.get(choice.rid), choice.text, choice.logprobs, 0)
                     for choice in chosen]
        if self._body.return_token_ids:
            for choice, answer in zip(chosen, formatted):
                answer.token_ids, answer.prompt_token_ids = choice.token_ids, choice.prompt_ids
        return self._completion(formatted, usage, AnswerMetadata.of(chosen), self._sglext(choices))

    def start(self, choices: Sequence[Choice]) -> None:
        self._text_offsets = [0] * len(choices)
        self._pending_ids = [[] for _ in choices]
        if self._echo is not None:
            self._echo.start(choices)

    def delta(self, choice: Choice) -> list[Completion]:
        first = not choice.started
        delta = choice.take_delta()
        prompt = None if self._echo is None else self._echo.take(choice)
        formatted = self._choice(choice, prompt, delta.text, joined(delta.logprobs), self._text_offsets[choice.index])
        if formatted.logprobs is not None:
            self._text_offsets[choice.index] += sum(map(len, formatted.logprobs.tokens))
        pending = self._pending_ids[choice.index]
        pending += delta.token_ids
        if self._body.return_token_ids and first:
            formatted.prompt_token_ids = choice.prompt_ids
        elif not formatted.text and formatted.logprobs is None and choice.finish is None:
            return []
        if self._with_ids:
            formatted.token_ids = pending
        self._pending_ids[choice.index] = []
        usage = self._usage([choice]) if self._body.reports_usage_always else None
        return [self._completion([formatted], usage,
                                 UNSET if choice.finish is None else AnswerMetadata.of([choice]))]

    def finish(self, choices: Sequence[Choice]) -> list[Completion]:
        chunks = []
        if sglext := self._sglext(choices):
            chunks.append(self._completion([], None, sglext=sglext))
        if self._body.reports_usage:
            chunks.append(self._completion([], self._usage(choices)))
        return chunks

    def _sglext(self, choices: Sequence[Choice]) -> SglExt | UnsetType:
        details = choices[0].cached_tokens_details
        return SglExt(details if self._body.return_cached_tokens_details and details else UNSET).or_unset

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None,
                    metadata: AnswerMetadata | UnsetType = UNSET, sglext: SglExt | UnsetType = UNSET) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage, metadata, sglext=sglext)

    def _usage(self, choices: Sequence[Choice]) -> Usage:
        return usage_of(choices, self._body.num_generated, report_cached=self._reports_cached)

    def _choice(self, choice: Choice, prompt: str | None, text: str, logprobs: Logprobs | None,
                offset: int) -> CompletionChoice:
        """``text`` and ``logprobs`` of output; ``prompt`` is the prompt's text, where it is echoed now."""
        reason = None if choice.finish is None else choice.finish.reason
        visible = choice.visible(logprobs)
        if prompt is not None:
            text = prompt + text
            visible = joined([part for part in (choice.prompt_logprobs, visible) if part is not None])
        if self._body.logprobs is None or (visible is not None and not visible.token_ids):
            visible = None
        formatted = None if visible is None else completion_logprobs(visible, self._token_bytes, offset)
        matched = None if choice.finish is None else choice.finish.matched
        states: list[float] | UnsetType = UNSET
        if choice.finish is not None and choice.request.return_hidden_states:
            states = last_state(choice.hidden_states, self._hidden_size)
        return CompletionChoice(choice.index, text, formatted, reason, matched,  # type: ignore[arg-type]
                                hidden_states=states)
