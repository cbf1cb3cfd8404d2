"""Transfers on the virtual clock: the real protocol cores, with messages that take a moment and links with a bandwidth.

A link joins one prefill and one decode server; its writes follow one another. Leases never expire here, because no
server dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from ...common.api.errors import ServingError
from ...common.kvcache.layout import KVLayout
from ...kvtransfer.protocol import messages as m
from ...kvtransfer.protocol.states import Phase
from ...kvtransfer.protocol.timing import Timing
from ...kvtransfer.receiver import receiver_state
from ...kvtransfer.receiver.receiver_core import ReceiverCore
from ...kvtransfer.sender import sender_state
from ...kvtransfer.sender.sender_core import SenderCore
from ..costs.model import TransferCosts
from .events import Events

C = TypeVar("C", bound="SenderCore | ReceiverCore")
PORT = 1
NEVER = Timing(bootstrap_timeout=1e12, transfer_timeout=1e12, peer_timeout=1e12)


def layout_of(costs: TransferCosts, page_size: int) -> KVLayout:
    """A pool whose pages have as many layer groups as are pushed one by one. Sizes of layers do not matter here."""
    return KVLayout((1,) * costs.layer_groups, 1, 1, page_size, "float8_e4m3fn")


@dataclass
class Network:
    """All prefill and decode servers' ends by name, and the links between them. ``bytes_sent`` by pair."""

    events: Events
    costs: TransferCosts
    page_size: int
    senders: dict[str, VirtualSender] = field(default_factory=dict)
    receivers: dict[str, VirtualReceiver] = field(default_factory=dict)
    bytes_sent: dict[tuple[str, str], int] = field(default_factory=dict)
    busy_seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    message_seconds: float = 0.0
    _free: dict[tuple[str, str], float] = field(default_factory=dict)
    _sessions: dict[bytes, tuple[str, str]] = field(default_factory=dict)

    def info(self, name: str) -> m.RankInfo:
        return m.RankInfo(name, name, 0, 1, layout_of(self.costs, self.page_size), "virtual")

    def connect_all(self) -> None:
        """Open every session, before the first request and in no time."""
        self.message_seconds = 0.0
        for receiver in self.receivers.values():
            for name in self.senders:
                receiver.core.connect((name, PORT), 0.0)
            receiver.called()
        self.events.run(0.0)
        self.message_seconds = self.costs.message / 1e3

    def deliver(self, late: float, receive: Callable[..., None], *arguments: object) -> None:
        """Call ``receive`` when a message has travelled that is sent ``late`` seconds from now."""
        self.events.at(self.events.now + late + self.message_seconds, receive, *arguments)

    def transmit(self, pair: tuple[str, str], num_bytes: int, done: Callable[[], None]) -> None:
        """Write bytes over the link of a pair; ``done`` is called when decode could know."""
        now = self.events.now
        seconds = num_bytes / (self.costs.bandwidth * 1e9)
        free = max(self._free.get(pair, 0.0), now) + seconds
        self._free[pair] = free
        self.bytes_sent[pair] = self.bytes_sent.get(pair, 0) + num_bytes
        self.busy_seconds[pair] = self.busy_seconds.get(pair, 0.0) + seconds
        self.events.at(free + self.costs.latency / 1e3, done)


class _End(Generic[C]):
    """One end of transfers: the interface of Transport over a core."""

    def __init__(self, name: str, core: C, network: Network, clock: Callable[[], float], changed: Callable[[], None]):
        """``clock``: the engine's time in seconds, which runs ahead of the events' clock. ``changed`` is called where a
        transfer has changed its state by a message or a write."""
        self.name = name
        self.core: C = core
        self._network = network
        self._clock = clock
        self._changed = changed

    @property
    def counters(self) -> dict[str, float]:
        return dict(self.core.counters)

    def phase(self, room: int) -> Phase:
        return self.core.transfers[room].phase

    def error(self, room: int) -> ServingError:
        error = self.core.transfers[room].error
        assert error is not None
        return error

    def abort(self, room: int, error: ServingError) -> None:
        self.core.abort(room, error, self._clock())
        self.called()

    def forget(self, room: int) -> None:
        self.core.forget(room)

    def called(self) -> None:
        """Carry out the effects of a scheduler's call, at the engine's time."""
        self._carry_out(max(0.0, self._clock() - self._network.events.now))

    def _carry_out(self, late: float = 0.0) -> None:
        """Carry out the core's effects, ``late`` seconds from now."""
        raise NotImplementedError


class VirtualSender(_End[SenderCore]):
    """A prefill server's end: the part of KVSender that its scheduler uses."""

    def __init__(self, name: str, network: Network, clock: Callable[[], float], changed: Callable[[], None]):
        super().__init__(name, SenderCore(network.info(name), NEVER), network, clock, changed)
        self._group_bytes = network.page_size * network.costs.bytes_per_token // network.costs.layer_groups
        network.senders[name] = self

    @property
    def writes_waiting(self) -> tuple[int, int]:
        return len(self.core.queue), 0

    def expect(self, room: int, prompt_digest: int, num_prompt_tokens: int) -> None:
        self.core.expect(room, prompt_digest, num_prompt_tokens, self._clock())
        self.called()

    def push(self, room: int, group: int, first: int, src_page_ids: np.ndarray, ready: float) -> None:
        self.core.push(room, group, first, src_page_ids, ready)
        self._network.events.at(ready, self._post)

    def finish(self, room: int, result: m.PrefillResult) -> None:
        self._network.events.at(self._clock(), self._finish, room, result)

    def await_ack(self, room: int) -> None:
        self.core.await_ack(room)

    def is_acknowledged(self, room: int) -> bool:
        return self.core.is_acknowledged(room)

    def stop_awaiting_ack(self, room: int) -> None:
        self.core.stop_awaiting_ack(room)

    # -- events --------------------------------------------------------------------------------------------------------

    def receive(self, session: bytes, message: m.ToSender) -> None:
        self.core.receive(session, message, self._network.events.now)
        self._carry_out()
        if not isinstance(message, m.FirstTokenAck):
            self._changed()

    def _finish(self, room: int, result: m.PrefillResult) -> None:
        self.core.finish(room, result, self._network.events.now)
        self._carry_out()
        self._changed()

    def _post(self) -> None:
        now = self._network.events.now
        for write in self.core.queue.take(now, lambda ready: ready <= now):
            pair = self.name, write.session.info.instance
            num_bytes = len(write.src_ids) * self._group_bytes
            self._network.transmit(pair, num_bytes, partial(self._written, write))

    def _written(self, write: sender_state.Write) -> None:
        transfer = write.transfer
        before = transfer.phase
        self.core.written(write, True, self._network.events.now)
        self._carry_out()
        if transfer.phase is not before:
            self._changed()

    def _carry_out(self, late: float = 0.0) -> None:
        effects, network = self.core.effects, self._network
        while effects:
            effect = effects.popleft()
            if isinstance(effect, sender_state.Send):
                receiver = network.receivers[network._sessions[effect.session][1]]
                network.deliver(late, receiver.receive, effect.session, effect.message)
            elif isinstance(effect, sender_state.Admit):
                self.core.sessions.admitted(effect.session, self.name, network.events.now)


class VirtualReceiver(_End[ReceiverCore]):
    """A decode server's end: the part of KVReceiver that its scheduler uses."""

    def __init__(self, name: str, network: Network, num_pages: int, clock: Callable[[], float],
                 changed: Callable[[], None]):
        super().__init__(name, ReceiverCore(network.info(name), NEVER, num_pages), network, clock, changed)
        network.receivers[name] = self

    def reserve(self, room: int, peer: tuple[str, int], prompt_digest: int, num_prompt_tokens: int, first_page: int,
                page_ids: np.ndarray, dp_rank: int | None = None,
                further: Sequence[tuple[int, np.ndarray]] = ()) -> None:
        self.core.reserve(room, peer, prompt_digest, num_prompt_tokens, first_page, page_ids, self._clock(), dp_rank,
                          further)
        self.called()

    def result(self, room: int) -> m.PrefillResult:
        result = self.core.transfers[room].result
        assert result is not None
        return result

    def with_draft(self, room: int) -> bool:
        return False

    def acknowledge(self, room: int) -> None:
        self.core.acknowledge(room)
        self.called()

    def decline(self, room: int, peer: tuple[str, int], error: ServingError) -> None:
        self.core.connections.decline(room, peer, error, self._clock())
        self.called()

    # -- events --------------------------------------------------------------------------------------------------------

    def receive(self, session: bytes, message: m.ToReceiver) -> None:
        self.core.receive(session, message, self._network.events.now)
        self._carry_out()
        self._changed()

    def _carry_out(self, late: float = 0.0) -> None:
        effects, network = self.core.effects, self._network
        while effects:
            effect = effects.popleft()
            if isinstance(effect, receiver_state.Lookup):
                sender = network.senders[effect.address[0]]
                self.core.connect_to_ranks(effect.address, [sender.core.info], network.events.now)
            elif isinstance(effect, receiver_state.Connect):
                network._sessions[effect.session.id] = effect.endpoint, self.name
            elif isinstance(effect, receiver_state.Send):
                sender = network.senders[network._sessions[effect.session][0]]
                network.deliver(late, sender.receive, effect.session, effect.message)
