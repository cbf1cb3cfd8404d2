"""Sends a workload's turns to an engine in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ...api.errors import ServingError
from ..workloads.workload import Conversation
from .answer import Answer, Drafted, Failure
from .apis import APIS, RequestOptions
from .load import History


class Engine(Protocol):
    """The part of ``baton.Engine`` that a benchmark uses."""

    def async_generate(self, prompt: str | None = None, sampling_params: Any = None, **fields: Any) -> Awaitable[Any]:
        """The answer; raises ServingError."""

    def start_profile(self, output_dir: str | None = None, num_steps: int | None = None,
                      activities: tuple[Any, ...] = ...) -> str: ...

    def stop_profile(self) -> str: ...


class EngineSender:
    """A Sender. Answers come in one piece."""

    def __init__(self, engine: Engine, *, ignore_eos: bool, clock: Callable[[], float]):
        self._engine = engine
        self._options = RequestOptions(ignore_eos=ignore_eos, stream=False)
        self._clock = clock

    def prepare(self, conversation: Conversation) -> None:
        """There is nothing to encode."""

    async def send(self, conversation: Conversation, history: History, answer: Answer) -> None:
        turn = conversation.turns[len(history)]
        body = APIS["baton"].body(self._options, history, turn.prompt, turn.output_len)
        del body["stream"]
        answer.sent = self._clock()
        try:
            found = await self._engine.async_generate(body.pop("text", None), body.pop("sampling_params"), **body)
        except ServingError as error:
            raise Failure(error.code, error.message) from None
        answer.last = self._clock()
        meta = found["meta_info"]
        answer.text, answer.ids = found["text"], found["output_ids"]
        answer.num_prompt, answer.num_output = meta["prompt_tokens"], meta["completion_tokens"]
        answer.num_cached, answer.drafted = meta["cached_tokens"], Drafted.of_meta(meta)
