"""Questions to the engine as a whole, which each of its attention groups answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from ..api.errors import ServingError, WorkerUnavailable
from ..api.messages import ConnectPeer, Control, Done, GetState, PrepareGrammar, RankTotals, State

Question = ConnectPeer | Control | GetState | PrepareGrammar
Answer = State | RankTotals | Done


class _Answers:
    """What ``wanted`` ranks answer to one question."""

    def __init__(self, wanted: int):
        self.all: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._wanted = wanted
        self._found: list[Answer] = []

    def add(self, answer: Answer) -> None:
        self._found.append(answer)
        if len(self._found) == self._wanted and not self.all.done():
            self.all.set_result(self._found)

    def fail(self, error: ServingError) -> None:
        if not self.all.done():
            self.all.set_exception(error)


class EngineRPC:
    """Those that wait for answers, by number. ``send`` takes a question to the engine.

    The first rank of each attention group answers for it; how the engine stands, each rank tells.
    """

    def __init__(self, num_groups: int, num_ranks: int, send: Callable[[Question], None]):
        self._num_groups = num_groups
        self._num_ranks = num_ranks
        self._send = send
        self._open: dict[int, _Answers] = {}
        self._numbers = itertools.count(1)

    async def ask(self, question: Callable[[int], Question], timeout: float) -> list[Answer]:
        """All answers to the question of the number that it is called with. Raises WorkerUnavailable after ``timeout``
        seconds, or what ``fail`` was given."""
        number = next(self._numbers)
        asked = question(number)
        wanted = self._num_ranks if isinstance(asked, GetState) else self._num_groups
        answers = self._open[number] = _Answers(wanted)
        try:
            self._send(asked)
            return await asyncio.wait_for(answers.all, timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise WorkerUnavailable(f"The engine did not answer within {timeout:g} s.") from None
        finally:
            del self._open[number]

    def answered(self, answer: Answer) -> None:
        """One of a question that nobody waits for any more is dropped."""
        if (answers := self._open.get(answer.seq)) is not None:
            answers.add(answer)

    def fail(self, error: ServingError) -> None:
        for answers in self._open.values():
            answers.fail(error)
