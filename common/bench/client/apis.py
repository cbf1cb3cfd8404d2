"""The APIs that a benchmark can speak: SGLang's ``/generate``, OpenAI's completions and chats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ...api.errors import ConfigError
from ..workloads.workload import Prompt
from .events import Read, read_chat, read_completion, read_generate
from .load import History


@dataclass(frozen=True)
class RequestOptions:
    """The fields that all requests of a run share. ``extra`` is merged into every body, nested objects too."""

    model: str | None = None
    ignore_eos: bool = True
    stream: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.model is not None:
            body["model"] = self.model
        body["stream"] = self.stream
        for name, value in self.extra.items():
            both = isinstance(value, dict) and isinstance(body.get(name), dict)
            body[name] = body[name] | value if both else value
        return body


class Api(Protocol):
    @property
    def path(self) -> str: ...

    @property
    def read(self) -> Read: ...

    def body(self, options: RequestOptions, history: History, prompt: Prompt, output_len: int) -> dict[str, Any]:
        """Raises ConfigError where this API cannot ask it."""


class GenerateApi:
    path = "/generate"
    read = staticmethod(read_generate)

    def body(self, options: RequestOptions, history: History, prompt: Prompt, output_len: int) -> dict[str, Any]:
        body: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": output_len}}
        if options.ignore_eos:
            body["sampling_params"]["ignore_eos"] = True
        if options.logprobs:
            body["return_logprob"] = True
        if prompt.ids is None:
            body["text"] = _joined(history, prompt)
        else:
            before = [token for asked, answer in history for token in (*(asked.ids or ()), *answer.ids)]
            body["input_ids"] = [*before, *prompt.ids]
        return options.complete(body)


class CompletionApi:
    path = "/v1/completions"
    read = staticmethod(read_completion)

    def body(self, options: RequestOptions, history: History, prompt: Prompt, output_len: int) -> dict[str, Any]:
        if history and prompt.ids is not None:
            raise ConfigError("Completions do not return token ids, which later turns need: leave out "
                              "--tokenize-prompt, or use --backend baton or sglang.")
        asked = _joined(history, prompt) if prompt.ids is None else prompt.ids
        body: dict[str, Any] = {"prompt": asked, "max_tokens": output_len}
        if options.logprobs:
            body["logprobs"] = 1
        return options.complete(_openai(options, body))


class ChatApi:
    path = "/v1/chat/completions"
    read = staticmethod(read_chat)

    def body(self, options: RequestOptions, history: History, prompt: Prompt, output_len: int) -> dict[str, Any]:
        if prompt.text is None:
            raise ConfigError("Chats are sent as text: leave out --tokenize-prompt, or use another --backend.")
        messages = []
        for asked, answer in history:
            messages += [_message("user", asked.text or ""), _message("assistant", answer.text)]
        messages.append(_message("user", prompt.text))
        body: dict[str, Any] = {"messages": messages, "max_completion_tokens": output_len}
        if options.logprobs:
            body["logprobs"] = True
        return options.complete(_openai(options, body))


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _openai(options: RequestOptions, body: dict[str, Any]) -> dict[str, Any]:
    body["temperature"] = 0
    if options.ignore_eos:  # not OpenAI's: its own servers refuse it
        body["ignore_eos"] = True
    if options.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _joined(history: History, prompt: Prompt) -> str:
    return "".join((asked.text or "") + answer.text for asked, answer in history) + (prompt.text or "")


APIS: dict[str, Api] = {
    "baton": GenerateApi(), "sglang": GenerateApi(), "vllm": CompletionApi(), "openai": CompletionApi(),
    "openai-chat": ChatApi(), "sglang-oai": CompletionApi(), "sglang-oai-chat": ChatApi(), "vllm-chat": ChatApi(),
}
"""By ``--backend``."""
