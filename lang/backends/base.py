"""A backend: what the interpreter asks of a server, an engine or another provider's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..chat_template import ChatTemplate
from ..choices import ChoicesMethod, Decision
from ..errors import ProgramError
from ..sampling import SamplingParams

Message = dict[str, Any]
"""``{"role": ..., "content": ...}``"""


@dataclass(frozen=True)
class Prompt:
    """A state's text so far, as one text and as messages with the open turn (``role`` is None outside of turns)."""

    text: str
    messages: tuple[Message, ...] = ()
    role: str | None = None
    turn: str = ""


@dataclass(frozen=True)
class Answer:
    """A generated text, or the texts of ``n``; of a stream the piece that is new."""

    text: str | list[str]
    meta_info: Any


class Backend(Protocol):
    """Runs the generations of programs. Several threads call it at the same time. It raises
    BackendError, of an engine in this process ServingError."""

    def chat_template(self) -> ChatTemplate:
        """The text around each role's turn."""

    def generate(self, prompt: Prompt, params: SamplingParams) -> Answer: ...

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Answer]:
        """Yields pieces of the text in order."""

    def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod) -> Decision: ...

    def cache_prefix(self, text: str) -> None:
        """Computes a text that several generations will begin with."""

    def flush_cache(self) -> None: ...

    def get_server_info(self) -> Any: ...


def whole_messages(prompt: Prompt, provider: str) -> list[Message]:
    """The messages for an API that knows chats alone, where the model is to write the next one.

    A prompt without turns is one message of the user. Raises ProgramError where the model would have to go on within a
    turn.
    """
    if not prompt.messages and prompt.role is None:
        return [{"role": "user", "content": prompt.text}]
    if prompt.role != "assistant" or prompt.turn:
        raise ProgramError(f"{provider} answers whole turns: gen must be all of assistant(...).")
    return list(prompt.messages)


def unsupported(provider: str, params: SamplingParams, taken: Sequence[str]) -> None:
    """Raises ProgramError for a parameter that is given and that the provider's API lacks."""
    for name in params.given():
        if name not in taken:
            raise ProgramError(f"{provider} has no {name}: leave it out, or run on a RuntimeEndpoint.")
