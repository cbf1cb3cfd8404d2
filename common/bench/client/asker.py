"""Asks a workload's turns of a server, over one of its APIs."""

from __future__ import annotations

from ..workloads.workload import Conversation
from .answer import Answer
from .apis import Api, Asking
from .client import Client
from .events import Reader
from .load import Said


class Asker:
    """A Sender. The first turns' requests are encoded before the clock runs, later ones when their turn has come."""

    def __init__(self, client: Client, api: Api, asking: Asking):
        self._client = client
        self._api = api
        self._asking = asking
        self._requests: dict[int, bytes] = {}

    def prepare(self, conversation: Conversation) -> None:
        """Raises ConfigError where the API cannot ask it."""
        self._requests[id(conversation)] = self._request(conversation, ())
        if len(conversation.turns) > 1:
            first = conversation.turns[0]
            self._request(conversation, [(first.prompt, Answer(first.prompt, first.output_len, 0.0))])

    async def send(self, conversation: Conversation, said: Said, answer: Answer) -> None:
        prepared = None if said else self._requests.pop(id(conversation), None)
        request = prepared or self._request(conversation, said)
        answer.sent = self._client.clock()
        await self._client.post(request, Reader(answer, self._api.read, stream=self._asking.stream))

    def _request(self, conversation: Conversation, said: Said) -> bytes:
        turn = conversation.turns[len(said)]
        return self._client.request(self._api.path, self._api.body(self._asking, said, turn.prompt, turn.output_len))
