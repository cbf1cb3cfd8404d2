"""LiteLLM's providers, through its package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..chat_template import ChatTemplate
from ..errors import ProgramError
from .openai import OpenAI


def LiteLLM(model_name: str, chat_template: ChatTemplate | None = None, **options: Any) -> OpenAI:  # noqa: N802
    """A chat model by LiteLLM's name; ``options`` go with each call (``api_key``, ``api_base``, ...).

    Raises ProgramError where the ``litellm`` package is not installed.
    """
    try:
        import litellm
    except ImportError:
        raise ProgramError("LiteLLM needs the litellm package: pip install litellm.") from None
    return OpenAI(model_name, True, chat_template, transport=_LiteLLMTransport(litellm.completion, options))


class _LiteLLMTransport:
    def __init__(self, completion: Any, options: dict[str, Any]):
        self._completion = completion
        self._options = options

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._completion(**body, **self._options).model_dump()
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for event in self._completion(**body, **self._options):
            yield event.model_dump()
