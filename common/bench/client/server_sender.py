"""Sends a workload's turns to a server, over one of its APIs."""

from __future__ import annotations

from ..workloads.workload import Conversation
from .answer import Answer
from .apis import Api, RequestOptions
from .client import Client
from .events import Reader
from .load import History


class ServerSender:
    """A Sender. The first turns' requests are encoded before the clock runs, later ones when they are sent."""

    def __init__(self, client: Client, api: Api, options: RequestOptions):
        self._client = client
        self._api = api
        self._options = options
        self._requests: dict[int, bytes] = {}

    def prepare(self, conversation: Conversation) -> None:
        """Encode the first request. Raises ConfigError where the API cannot express a turn."""
        self._requests[id(conversation)] = self._request(conversation, ())
        if len(conversation.turns) > 1:
            first = conversation.turns[0]
            self._request(conversation, [(first.prompt, Answer(first.prompt, first.output_len, 0.0))])

    async def send(self, conversation: Conversation, history: History, answer: Answer) -> None:
        prepared = None if history else self._requests.pop(id(conversation), None)
        request = prepared or self._request(conversation, history)
        answer.sent = self._client.clock()
        await self._client.post(request, Reader(answer, self._api.read, stream=self._options.stream))

    def _request(self, conversation: Conversation, history: History) -> bytes:
        turn = conversation.turns[len(history)]
        return self._client.request(self._api.path,
                                    self._api.body(self._options, history, turn.prompt, turn.output_len))
