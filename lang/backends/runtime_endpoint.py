"""A running server of ours or of SGLang's, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..chat_template import ChatTemplate, template_named, template_of_model
from ..choices import ChoicesMethod, Decision
from ..http import JSONClient, bearer
from ..sampling import SamplingParams
from . import native
from .base import Answer, Prompt
from .served_template import served_template


class RuntimeEndpoint:
    """A server or router at ``base_url``.

    The text around turns is the template named ``chat_template_name``, else the server's own, else (of servers whose
    ``/tokenize`` takes no messages) what the model's name suggests. ``verify`` is a file of certificates to trust.
    Raises BackendError where the server cannot be reached, ProgramError for an unknown template.
    """

    def __init__(self, base_url: str, api_key: str | None = None, verify: str | None = None,
                 chat_template_name: str | None = None):
        self.base_url = base_url
        self._http = JSONClient(base_url, bearer(api_key), verify)
        self._client = _GenerateEndpoint(self._http)
        self.model_info = self._http.get("/get_model_info")
        model = self.get_model_name()
        self._template = (template_named(chat_template_name) if chat_template_name
                          else served_template(self._http.post) or template_of_model(model))

    def get_model_name(self) -> str:
        return str(self.model_info["model_path"])

    def chat_template(self) -> ChatTemplate:
        return self._template

    def generate(self, prompt: Prompt, params: SamplingParams) -> Answer:
        return native.generate(self._client, prompt, params)

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Answer]:
        return native.stream(self._client, prompt, params)

    def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod) -> Decision:
        return native.select(self._client, prompt, choices, method)

    def cache_prefix(self, text: str) -> None:
        native.cache_prefix(self._client, text)

    def flush_cache(self) -> None:
        self._http.post("/flush_cache", {})

    def get_server_info(self) -> Any:
        return self._http.get("/get_server_info")


class _GenerateEndpoint:
    """``/generate`` of a server."""

    def __init__(self, http: JSONClient):
        self._http = http

    def answer(self, body: dict[str, Any]) -> Any:
        return self._http.post("/generate", body)

    def answers(self, body: dict[str, Any]) -> Iterator[Any]:
        return self._http.events("/generate", {**body, "stream": True})
