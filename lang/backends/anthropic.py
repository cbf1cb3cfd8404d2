"""Anthropic's API, through its package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..chat_template import TEMPLATES, ChatTemplate
from ..choices import ChoicesMethod, Decision
from ..errors import BackendError, ProgramError
from ..sampling import SamplingParams
from .base import Answer, Prompt, unsupported, whole_messages

_TAKEN = ("max_new_tokens", "stop", "temperature", "top_p", "top_k")


class Anthropic:
    """``model_name`` of Anthropic; ``options`` are its client's (``api_key``, ``base_url``, ...).

    Raises ProgramError where the ``anthropic`` package is not installed.
    """

    def __init__(self, model_name: str, **options: Any):
        try:
            import anthropic
        except ImportError:
            raise ProgramError("Anthropic needs the anthropic package: pip install anthropic.") from None
        self.model_name = model_name
        self._client: Any = anthropic.Anthropic(**options)
        self._error = anthropic.AnthropicError

    def chat_template(self) -> ChatTemplate:
        return TEMPLATES["default"]

    def generate(self, prompt: Prompt, params: SamplingParams) -> Answer:
        try:
            answer = self._client.messages.create(**self._body(prompt, params))
        except self._error as error:
            raise BackendError(str(error), getattr(error, "status_code", None)) from None
        text = "".join(block.text for block in answer.content if block.type == "text")
        return Answer(text, {"stop_reason": answer.stop_reason, "usage": answer.usage.model_dump()})

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Answer]:
        try:
            with self._client.messages.stream(**self._body(prompt, params)) as stream:
                for text in stream.text_stream:
                    yield Answer(text, {})
        except self._error as error:
            raise BackendError(str(error), getattr(error, "status_code", None)) from None

    def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod) -> Decision:
        raise ProgramError("Anthropic's API cannot score choices: use a RuntimeEndpoint or OpenAI.")

    def cache_prefix(self, text: str) -> None:
        """Does nothing: its cache is asked for request by request."""

    def flush_cache(self) -> None:
        raise ProgramError("Anthropic's API cannot flush a cache: use a RuntimeEndpoint.")

    def get_server_info(self) -> Any:
        raise ProgramError("Anthropic's API has no server info: use a RuntimeEndpoint.")

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        unsupported("Anthropic's API", params, _TAKEN)
        messages = whole_messages(prompt, "Anthropic's API")
        system = "\n".join(message["content"] for message in messages if message["role"] == "system")
        body = {"model": self.model_name, "max_tokens": params.max_new_tokens or 128, "system": system or None,
                "messages": [message for message in messages if message["role"] != "system"],
                "stop_sequences": params.stops() or None, "temperature": params.temperature, "top_p": params.top_p,
                "top_k": params.top_k}
        return {name: value for name, value in body.items() if value is not None}
