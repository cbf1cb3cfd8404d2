"""Runs a workload: each conversation at its arrival time, with bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from ..workloads.workload import Conversation, Prompt
from .answer import Answer, Failure

History = Sequence[tuple[Prompt, Answer]]
"""The earlier turns of a conversation with their answers."""


class Sender(Protocol):
    def prepare(self, conversation: Conversation) -> None:
        """Encode what can be encoded before the clock runs."""

    async def send(self, conversation: Conversation, history: History, answer: Answer) -> None:
        """Send the turn that follows ``history`` and fill ``answer``. Raises Failure."""


class Load:
    """One run. ``answers`` are those that have ended, also while it runs and after it was cancelled."""

    def __init__(self, sender: Sender, clock: Callable[[], float], *, max_concurrency: int | None = None,
                 ended: Callable[[Answer, Load], None] = lambda answer, load: None):
        """``ended(answer, load)`` is called for each answer. ``max_concurrency`` bounds the open conversations."""
        self._sender = sender
        self._clock = clock
        self._gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._ended = ended
        self._begin = 0.0
        self._end: float | None = None
        self.answers: list[Answer] = []
        self.num_open = 0

    @property
    def begin(self) -> float:
        """The clock when the first request was due."""
        return self._begin

    @property
    def duration(self) -> float:
        """Seconds from the beginning to the last answer's end, or until now."""
        return (self._clock() if self._end is None else self._end) - self._begin

    async def run(self, conversations: Sequence[Conversation], due: Sequence[float]) -> None:
        """``due``: seconds from now, ascending. Cancelled, it ends what is open and leaves that out."""
        for conversation in conversations:
            self._sender.prepare(conversation)
        tasks: list[asyncio.Task[None]] = []
        self._begin = self._clock()
        try:
            for conversation, seconds in zip(conversations, due):
                if (wait := self._begin + seconds - self._clock()) > 0:
                    await asyncio.sleep(wait)
                if self._gate is not None:
                    await self._gate.acquire()
                tasks.append(asyncio.create_task(self._talk(conversation, self._begin + seconds)))
            await asyncio.gather(*tasks)
        finally:
            self._end = self._clock()
            await _cancel(tasks)

    async def _talk(self, conversation: Conversation, due: float) -> None:
        try:
            await self._turns(conversation, due)
        finally:
            if self._gate is not None:
                self._gate.release()

    async def _turns(self, conversation: Conversation, due: float) -> None:
        """Send the turns in order. A failed turn fails all later ones, which would need its answer."""
        history: list[tuple[Prompt, Answer]] = []
        failure: Failure | None = None
        for turn in conversation.turns:
            answer = Answer(turn.prompt, turn.output_len, due, self._clock())
            if failure is None:
                self.num_open += 1
                try:
                    await self._sender.send(conversation, history, answer)
                except Failure as error:
                    answer.failure = failure = error
                finally:
                    self.num_open -= 1
            else:
                answer.failure = Failure("turn before failed", failure.message)
            self.answers.append(answer)
            self._ended(answer, self)
            history.append((turn.prompt, answer))
            due = self._clock()  # the next turn's


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
