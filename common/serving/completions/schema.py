"""``/v1/completions``: request, answer and chunks, field by field as OpenAI's clients send and parse them."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from ...api.errors import InvalidRequest
from ...api.wire import Int32
from ..protocol.answer_metadata import AnswerMetadata
from ..protocol.decoding import BodyDecoder
from ..protocol.logprobs import CompletionLogprobs
from ..protocol.sampling import MAX_CHOICES, CommonFields, check_common_fields, check_range
from ..protocol.unsupported_fields import COMPLETION
from ..protocol.usage import FinishReason, SglExt, Usage

MAX_COMPLETION_LOGPROBS = 5


class CompletionRequest(CommonFields, kw_only=True):
    prompt: str | list[str | Int32 | list[Int32]]
    logprobs: Int32 | None = None
    best_of: Int32 | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def num_generated(self) -> int:
        """Choices that are generated for each prompt; ``num_choices`` of them are returned."""
        return self.num_choices if self.best_of is None else self.best_of


_completion = BodyDecoder(CompletionRequest, COMPLETION)


def decode_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest."""
    request = _completion.decode(body)
    check_common_fields(request)
    check_range("logprobs", request.logprobs, 0, MAX_COMPLETION_LOGPROBS)
    check_range("best_of", request.best_of, request.num_choices, MAX_CHOICES)
    if request.stream and request.num_generated > request.num_choices:
        raise InvalidRequest("best_of cannot be streamed: the best choice is known at the end; leave out either.",
                             param="best_of")
    return request


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    hidden_states: list[float] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """An answer, or one chunk of a stream: OpenAI gives both the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metadata: AnswerMetadata | UnsetType = UNSET
    object: str = "text_completion"
    sglext: SglExt | UnsetType = UNSET
