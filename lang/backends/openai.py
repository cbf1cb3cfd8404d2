"""OpenAI's API, and others that speak it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from ..chat_template import TEMPLATES, ChatTemplate
from ..choices import ChoicesMethod, Decision
from ..errors import BackendError, ProgramError
from ..http import JSONClient, bearer
from ..sampling import SamplingParams
from .base import Answer, Prompt, unsupported, whole_messages

_TAKEN = ("max_new_tokens", "n", "stop", "temperature", "top_p", "frequency_penalty", "presence_penalty", "json_schema")
_COMPLETION_MODELS = ("gpt-3.5-turbo-instruct",)


class Transport(Protocol):
    """Sends bodies to ``chat/completions`` or ``completions``; raises BackendError."""

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]: ...


class OpenAI:
    """``model_name`` at ``base_url`` (default: OPENAI_BASE_URL, else OpenAI's own), with ``api_key`` or OPENAI_API_KEY.

    Requests go through the ``openai`` package where it is installed, which then takes ``options`` (timeouts, retries;
    Azure's with ``is_azure``), else through plain HTTP; ``transport`` replaces both. Raises ProgramError for
    options that need the package.
    """

    def __init__(self, model_name: str, is_chat_model: bool | None = None, chat_template: ChatTemplate | None = None,
                 is_azure: bool = False, *, base_url: str | None = None, api_key: str | None = None,
                 transport: Transport | None = None, **options: Any):
        self.model_name = model_name
        self.is_chat_model = model_name not in _COMPLETION_MODELS if is_chat_model is None else is_chat_model
        self._template = chat_template or TEMPLATES["default"]
        self._transport = transport or _transport(base_url, api_key, is_azure, options)

    def chat_template(self) -> ChatTemplate:
        """Text around turns, which completion models alone see."""
        return self._template

    def generate(self, prompt: Prompt, params: SamplingParams) -> Answer:
        answer = self._transport.create(self._path(), self._body(prompt, params))
        texts = [self._text(choice, "message") for choice in answer["choices"]]
        info = {"usage": answer.get("usage"), "finish_reason": answer["choices"][0].get("finish_reason")}
        return Answer(texts if len(texts) > 1 else texts[0], info)

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Answer]:
        info: dict[str, Any] = {"finish_reason": None}
        for event in self._transport.stream(self._path(), {**self._body(prompt, params), "stream": True}):
            for choice in event["choices"]:
                info = {"finish_reason": choice.get("finish_reason")}
                yield Answer(self._text(choice, "delta"), info)

    def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod) -> Decision:
        """The model names its choice, by a JSON schema that allows these alone; ``method`` is not asked."""
        if not self.is_chat_model:
            raise ProgramError("select needs a chat model of OpenAI's API, or a RuntimeEndpoint.")
        schema = {"type": "object", "properties": {"choice": {"type": "string", "enum": list(choices)}},
                  "required": ["choice"], "additionalProperties": False}
        answer = self.generate(prompt, SamplingParams(max_new_tokens=256, json_schema=schema, temperature=0.0))
        try:
            return Decision(str(json.loads(str(answer.text))["choice"]), answer.meta_info)
        except (ValueError, KeyError, TypeError):
            raise BackendError(f"{self.model_name} named none of the choices: {answer.text}") from None

    def cache_prefix(self, text: str) -> None:
        """Does nothing: the provider caches by itself."""

    def flush_cache(self) -> None:
        raise ProgramError("OpenAI's API cannot flush a cache: use a RuntimeEndpoint.")

    def get_server_info(self) -> Any:
        raise ProgramError("OpenAI's API has no server info: use a RuntimeEndpoint.")

    def _path(self) -> str:
        return "chat/completions" if self.is_chat_model else "completions"

    def _text(self, choice: dict[str, Any], chat_field: str) -> str:
        return (choice[chat_field].get("content") if self.is_chat_model else choice.get("text")) or ""

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        unsupported("OpenAI's API", params, _TAKEN)
        given = {**params.given(), "stop": params.stops() or None, "max_tokens": params.max_new_tokens}
        body = {name: value for name, value in given.items()
                if value is not None and name not in ("max_new_tokens", "json_schema")}
        if schema := params.schema():
            body["response_format"] = {"type": "json_schema",
                                       "json_schema": {"name": "answer", "strict": True, "schema": json.loads(schema)}}
        content = ({"messages": whole_messages(prompt, "A chat model of OpenAI's API")} if self.is_chat_model
                   else {"prompt": prompt.text})
        return {"model": self.model_name, **content, **body}


def _transport(base_url: str | None, api_key: str | None, is_azure: bool, options: dict[str, Any]) -> Transport:
    if find_spec("openai") is not None:
        return _PackageTransport(base_url, api_key, is_azure, options)
    if is_azure or options:
        raise ProgramError("is_azure and options of the client need the openai package: pip install openai.")
    return HTTPTransport(base_url, api_key)


class HTTPTransport:
    """Plain HTTP, without retries."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None):
        url = base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        self._http = JSONClient(url, bearer(api_key or os.environ.get("OPENAI_API_KEY")))

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.post(f"/{path}", body)
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return self._http.events(f"/{path}", body)


class _PackageTransport:
    """The ``openai`` package."""

    def __init__(self, base_url: str | None, api_key: str | None, is_azure: bool, options: dict[str, Any]):
        import openai

        given = {name: value for name, value in (("base_url", base_url), ("api_key", api_key)) if value is not None}
        make: Any = openai.AzureOpenAI if is_azure else openai.OpenAI
        self._error = openai.OpenAIError
        try:
            self._client: Any = make(**given, **options)
        except openai.OpenAIError as error:
            raise BackendError(str(error)) from None

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._endpoint(path).create(**body).model_dump()
            return answer
        except self._error as error:
            raise _refused(error) from None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            for event in self._endpoint(path).create(**body):
                yield event.model_dump()
        except self._error as error:
            raise _refused(error) from None

    def _endpoint(self, path: str) -> Any:
        return self._client.chat.completions if path == "chat/completions" else self._client.completions


def _refused(error: Exception) -> BackendError:
    return BackendError(str(error), getattr(error, "status_code", None))
