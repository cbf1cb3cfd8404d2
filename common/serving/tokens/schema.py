"""``/tokenize`` and ``/detokenize``: requests and answers in vLLM's and SGLang's shapes, which agree but for batches
(SGLang's) and chats (vLLM's)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...api.errors import InvalidRequest
from ...api.wire import Int32
from ..chat.schema import ChatRequest, Message, Tool
from ..protocol.decoding import BodyDecoder


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` (a text, or several) or ``messages``, which go through the chat template."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None

    @property
    def adds_special_tokens(self) -> bool:
        """By default to a text, and not to a chat: its template writes them."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def chat(self) -> ChatRequest:
        assert self.messages is not None
        return ChatRequest(messages=self.messages, tools=self.tools, chat_template_kwargs=self.chat_template_kwargs,
                           tool_choice=self.tool_choice, reasoning_effort=self.reasoning_effort,
                           continue_final_message=self.continue_final_message,
                           add_generation_prompt=None if self.continue_final_message else self.add_generation_prompt)


class TokenizeAnswer(msgspec.Struct):
    """One prompt's tokens, or a list for a list of prompts."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: Sequence[str | list[str]] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct):
    tokens: list[Int32 | list[Int32]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeAnswer(msgspec.Struct):
    """``text`` is SGLang's field and leaves special tokens out by default, ``prompt`` is vLLM's and keeps them."""

    text: str | list[str]
    prompt: str | list[str]


_tokenize = BodyDecoder(TokenizeRequest)
_detokenize = BodyDecoder(DetokenizeRequest)


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """Raises InvalidRequest."""
    request = _tokenize.decode(body)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Send either prompt or messages.", param="prompt")
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequest("add_generation_prompt and continue_final_message exclude each other.",
                             param="continue_final_message")
    return request


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    """Raises InvalidRequest."""
    request = _detokenize.decode(body)
    if len({isinstance(item, list) for item in request.tokens}) > 1:
        raise InvalidRequest("tokens must not mix token ids and lists.", param="tokens")
    return request
