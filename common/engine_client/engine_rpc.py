"""Engine RPC: requests to the engine as a whole, to which each of its attention groups replies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from ..api.errors import ServingError, WorkerUnavailable
from ..api.messages import ConnectPeer, Control, Done, GetState, PrepareGrammar, RankTotals, State

RPCRequest = ConnectPeer | Control | GetState | PrepareGrammar
RPCReply = State | RankTotals | Done


class _PendingCall:
    """Collects the replies of ``num_replies`` ranks to one request."""

    def __init__(self, num_replies: int):
        self.replies: asyncio.Future[list[RPCReply]] = asyncio.get_running_loop().create_future()
        self._num_replies = num_replies
        self._received: list[RPCReply] = []

    def add(self, reply: RPCReply) -> None:
        self._received.append(reply)
        if len(self._received) == self._num_replies and not self.replies.done():
            self.replies.set_result(self._received)

    def fail(self, error: ServingError) -> None:
        if not self.replies.done():
            self.replies.set_exception(error)


class EngineRPC:
    """Calls that wait for replies, by sequence number. ``send`` takes a request to the engine.

    The first rank of each attention group replies for the group; to ``GetState`` every rank replies.
    """

    def __init__(self, num_groups: int, num_ranks: int, send: Callable[[RPCRequest], None]):
        self._num_groups = num_groups
        self._num_ranks = num_ranks
        self._send = send
        self._pending: dict[int, _PendingCall] = {}
        self._numbers = itertools.count(1)

    async def call(self, make_request: Callable[[int], RPCRequest], timeout: float) -> list[RPCReply]:
        """Send the request that ``make_request`` builds from a sequence number; returns all replies. Raises
        WorkerUnavailable after ``timeout`` seconds, or the error that ``fail`` was called with."""
        number = next(self._numbers)
        request = make_request(number)
        call = self._pending[number] = _PendingCall(
            self._num_ranks if isinstance(request, GetState) else self._num_groups)
        try:
            self._send(request)
            return await asyncio.wait_for(call.replies, timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise WorkerUnavailable(f"The engine did not answer within {timeout:g} s.") from None
        finally:
            del self._pending[number]

    def on_reply(self, reply: RPCReply) -> None:
        """Deliver a reply; it is dropped where its call has ended."""
        if (call := self._pending.get(reply.seq)) is not None:
            call.add(reply)

    def fail(self, error: ServingError) -> None:
        """End all pending calls with ``error``."""
        for call in self._pending.values():
            call.fail(error)
