"""Asks a server the questions of an exam."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..exams.exam import Asked
from ..exams.numbers import number_in
from ..exams.prompts import ScoredChoice, chat_prompt, plain_prompt, scored_choices
from ..workloads.vocabulary import Tokenizer
from .answer import Failure
from .client import Client

_STOP = "Question:"  # a model without a chat template goes on with the next one


@dataclass(frozen=True)
class Outcome:
    """A question's answer: the choice, or the number, which is None where the ``text`` has none; or why there is no
    answer. ``num_tokens``: generated."""

    asked: Asked
    answer: str | None = None
    text: str = ""
    num_tokens: int = 0
    failure: Failure | None = None

    @property
    def right(self) -> bool:
        return self.answer == self.asked.question.right


class Examinee:
    """One server's model. Questions are asked in the form that ``chat`` chooses, greedily."""

    def __init__(self, client: Client, tokenizer: Tokenizer, *, chat: bool, max_new_tokens: int):
        self._client = client
        self._tokenizer = tokenizer
        self._chat = chat
        self._max_new_tokens = max_new_tokens

    async def ask_all(self, exam: Sequence[Asked], parallel: int, ended: Callable[[], None]) -> list[Outcome]:
        """In the exam's order; ``ended()`` is called after each. A failed request is an Outcome, too."""
        gate = asyncio.Semaphore(parallel)

        async def one(asked: Asked) -> Outcome:
            async with gate:
                try:
                    outcome = await self.ask(asked)
                except Failure as failure:
                    outcome = Outcome(asked, failure=failure)
            ended()
            return outcome

        return await asyncio.gather(*map(one, exam))

    async def ask(self, asked: Asked) -> Outcome:
        """Raises Failure."""
        prompt = chat_prompt(asked, self._tokenizer) if self._chat else plain_prompt(asked)
        choices = asked.question.choices
        if choices:
            scored = scored_choices(prompt, choices, self._tokenizer, chat=self._chat)
            # One after the other: the first puts the prompt into the prefix cache for the others.
            scores = [await self._score(choice) for choice in scored]
            return Outcome(asked, choices[scores.index(max(scores))])
        return await self._generate(asked, prompt)

    async def _score(self, choice: ScoredChoice) -> float:
        """The mean log-probability of a choice's bytes."""
        count = len(choice.ids) - choice.start
        found = await self._post({
            "input_ids": list(choice.ids), "return_logprob": True, "logprob_start_len": max(0, choice.start - 1),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0}})
        listed = found["meta_info"]["input_token_logprobs"][-count:]
        if len(listed) < count or any(entry[0] is None for entry in listed):
            raise Failure("unreadable answer", f"The server gives no log-probability of {count} tokens of the prompt.")
        return sum(float(entry[0]) for entry in listed) / max(choice.num_bytes, 1)

    async def _generate(self, asked: Asked, prompt: str) -> Outcome:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": self._max_new_tokens}
        if not self._chat:
            sampling["stop"] = [_STOP]
        ids = self._tokenizer.encode(prompt, add_special_tokens=not self._chat)
        found = await self._post({"input_ids": ids, "sampling_params": sampling})
        return Outcome(asked, number_in(found["text"]), found["text"], found["meta_info"]["completion_tokens"])

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Raises Failure."""
        whole = _Whole()
        await self._client.post(self._client.request("/generate", body), whole)
        try:
            found: dict[str, Any] = msgspec.json.decode(whole.body, type=dict)
            if not {"text", "meta_info"} <= found.keys():
                raise Failure("unreadable answer", f"The answer has no text and meta_info: {found}")
        except msgspec.MsgspecError as error:
            raise Failure("unreadable answer", str(error)) from None
        return found


class _Whole:
    """A Reader that keeps the body."""

    def __init__(self) -> None:
        self.body = b""

    def feed(self, data: bytes, now: float) -> None:
        self.body += data

    def end(self) -> None:
        pass
