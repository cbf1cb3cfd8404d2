"""Connections of a receiver to prefill servers: looked up, opened, used and given up.

A *session* is one connection to one sender instance. It is never repaired. When it breaks, the transfers published over
it fail, and the next reservation looks the sender up anew, which is also how a restarted prefill server at the same
address is found: its instance id differs. A receiver has sessions with all ranks of a prefill server that write to it;
a transfer is published over all of them, and done when each has sent its result.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ...common.api.errors import PairMismatch, ServingError, TransferFailed
from ..endpoint import reachable_endpoint
from ..expiring import MAX_WAITING
from ..protocol import messages as m
from ..protocol.reshard import make_group_plan, writer_ranks
from ..protocol.timing import Timing
from .receiver_state import (
    Address,
    Close,
    Connect,
    Effect,
    Lookup,
    LookupState,
    ReceiverSession,
    Send,
    ServerConnection,
)

RETRY_INTERVAL = 0.25


class Connections:
    """Sessions with prefill servers, by server.

    ``hello`` is sent to every sender, with that sender's instance; ``is_awaited`` returns whether transfers wait for a
    connection to an address. The owner decides what becomes of transfers, waiting or published.
    """

    def __init__(self, hello: m.Hello, timing: Timing, effects: deque[Effect], is_awaited: Callable[[Address], bool]):
        self.hello = hello
        self.timing = timing
        self.effects = effects
        self.servers: dict[Address, ServerConnection] = {}  # connected, or about to be
        self.sessions: dict[bytes, ReceiverSession] = {}  # all that have a connection
        self.lookups: dict[Address, LookupState] = {}
        self.declines: dict[Address, deque[tuple[float, m.Decline]]] = {}  # with deadlines, until there is a connection
        self._is_awaited = is_awaited
        self._warned_instances: dict[Address, str] = {}  # instances that were sent our mismatch

    def __bool__(self) -> bool:
        """True where anything here has a deadline."""
        return bool(self.sessions or self.lookups or self.declines)

    @property
    def has_writers(self) -> bool:
        """True where a sender may be writing to us."""
        return any(session.transfers or not session.welcome for session in self.sessions.values())

    def send(self, session: ReceiverSession, message: m.ToSender) -> None:
        self.effects.append(Send(session.id, message))

    def send_if_open(self, session_id: bytes, message: m.ToSender) -> None:
        """Sends the message unless the session's connection is gone."""
        if (session := self.sessions.get(session_id)) is not None:
            self.send(session, message)

    # -- lookups --------------------------------------------------------------------------------------------------

    def connection_to(self, address: Address) -> ServerConnection | None:
        """Returns a server once all of its ranks have welcomed us, else None; starts to connect where needed."""
        server = self.servers.get(address)
        if server is not None:
            return server if server.welcome else None
        if address not in self.lookups:
            self.lookups[address] = LookupState()
            self.effects.append(Lookup(address))
        return None

    def connect(self, address: Address, ranks: Sequence[m.RankInfo], now: float) -> ServingError | None:
        """Opens sessions with the ranks of the server at ``address``, all of them in order. Returns an error where its
        pages cannot travel to us."""
        if not self.is_needed(address) or address in self.servers:
            self.drop_lookup(address)
            return None
        ours = self.hello.info
        if len({rank.model for rank in ranks}) > 1:
            self.not_registered(address, "its weights are being replaced", now)
            return None
        why = next((why for rank in ranks if (why := ours.mismatch(rank)) is not None), None)
        if why is not None:
            self.drop_lookup(address)
            self._report_mismatch(address, ranks[0], now)
            return PairMismatch(m.describe_mismatch(why))
        server = self.servers[address] = ServerConnection({}, dp_size=ranks[0].dp_size)
        its_layouts, our_layouts = m.pair_layouts(ranks[0], ours)
        server.with_draft = ours.takes_draft_from(ranks[0])
        writers = writer_ranks(ours.rank, its_layouts, our_layouts)
        for info in (info for info in ranks if info.rank in writers):
            plan = make_group_plan(info.rank, its_layouts, ours.rank, our_layouts)
            assert plan is not None
            server.blocks, server.subpages = plan.dst_blocks, plan.dst_subpages  # the same for all ranks
            session = self._open(address, info, now)
            server.sessions[session.id] = session
        return None

    def _open(self, address: Address, info: m.RankInfo, now: float) -> ReceiverSession:
        session = ReceiverSession(secrets.token_hex(16).encode(), address, info.instance, heard=now,
                                  last_pong=-float("inf"), dp_rank=info.dp_rank)
        self.sessions[session.id] = session
        self.effects.append(Connect(session, reachable_endpoint(address[0], info.endpoint)))
        self.send(session, msgspec.structs.replace(self.hello, expected=info.instance))
        return session

    def _report_mismatch(self, address: Address, info: m.RankInfo, now: float) -> None:
        """Says Hello once all the same, on a session outside of ``servers``, so that prefill logs the mismatch, too."""
        if self._warned_instances.get(address) != info.instance:
            self._warned_instances[address] = info.instance
            self._open(address, info, now)

    def is_current(self, session: ReceiverSession) -> bool:
        """True where new transfers to the session's address use it."""
        server = self.servers.get(session.address)
        return server is not None and session.id in server.sessions

    def set_info(self, info: m.RankInfo) -> None:
        """Replaces our description, for the sessions that follow."""
        self.hello = msgspec.structs.replace(self.hello, info=info)
        self._warned_instances.clear()

    def not_registered(self, address: Address, reason: str, now: float) -> None:
        """Retries until each transfer's deadline: the bootstrap server answers, and its ranks are still starting."""
        self._retry(address, reason, now).unreachable_since = None

    def unreachable(self, address: Address, reason: str, now: float) -> ServingError | None:
        """Retries a server that does not answer, for ``peer_timeout``; then returns the error to give up with."""
        lookup = self._retry(address, reason, now)
        if lookup.unreachable_since is None:
            lookup.unreachable_since = now
        if now - lookup.unreachable_since < self.timing.peer_timeout:
            return None
        self.drop_lookup(address)
        return TransferFailed(f"the prefill server at {address[0]}:{address[1]} cannot be reached: {reason}",
                              cause="unreachable")

    def drop_lookup(self, address: Address) -> None:
        self.lookups.pop(address, None)

    def _retry(self, address: Address, reason: str, now: float) -> LookupState:
        lookup = self.lookups.setdefault(address, LookupState())
        lookup.retry_at, lookup.reason = now + RETRY_INTERVAL, reason
        return lookup

    # -- declines of transfers that were never published -------------------------------------------------------------

    def decline(self, room: int, address: Address, error: ServingError, now: float) -> None:
        """Tells the senders there, now or once connected, that nothing will be reserved for a room."""
        decline = m.Decline(room, error.wire_code, error.message)
        if (server := self.connection_to(address)) is not None:
            for session in server.sessions.values():
                self.send(session, decline)
            return
        waiting = self.declines.setdefault(address, deque(maxlen=MAX_WAITING))
        waiting.append((now + self.timing.bootstrap_timeout, decline))

    def send_declines(self, address: Address, server: ServerConnection) -> None:
        for _, decline in self.declines.pop(address, ()):
            for session in server.sessions.values():
                self.send(session, decline)

    def drop_declines(self, address: Address) -> None:
        """Drops the declines for a server that is not there."""
        self.declines.pop(address, None)

    # -- sessions -------------------------------------------------------------------------------------------------

    def add_welcomed(self, session: ReceiverSession) -> ServerConnection | None:
        """Records the sender's Welcome. Returns the session's server where that was the last Welcome missing."""
        session.welcome = True
        server = self.servers.get(session.address)
        if server is None or session.id not in server.sessions or not server.welcome:
            return None
        self.drop_lookup(session.address)
        return server

    def remove(self, session: ReceiverSession, now: float) -> None:
        """Removes a session whose connection is gone."""
        del self.sessions[session.id]
        self.detach(session, now)

    def detach(self, session: ReceiverSession, now: float) -> None:
        """Stops using a session that has ended or was given up. The other sessions with its server serve open
        transfers, and are then closed."""
        server = self.servers.get(session.address)
        if server is None or session.id not in server.sessions:
            return
        del self.servers[session.address]
        for other in server.sessions.values():
            other.retired = True
        if self.is_needed(session.address):
            # Not at once: a bootstrap server may still list a rank that has just died.
            self.lookups.setdefault(session.address, LookupState()).retry_at = now + RETRY_INTERVAL / 5
        else:
            self.drop_lookup(session.address)

    def close_unused(self, session: ReceiverSession) -> None:
        if (session.silent or session.retired) and not session.transfers:
            del self.sessions[session.id]
            self._send_bye(session)

    def close(self) -> None:
        for session in list(self.sessions.values()):
            self._send_bye(session)
        self.sessions.clear()
        self.servers.clear()

    def tick(self, now: float) -> None:
        """Retries lookups that are due, and drops declines that are too old."""
        for address, declines in list(self.declines.items()):
            while declines and declines[0][0] <= now:
                declines.popleft()
            if not declines:
                del self.declines[address]
        for address, lookup in list(self.lookups.items()):
            if lookup.retry_at is not None and now >= lookup.retry_at:
                lookup.retry_at = None
                if self.is_needed(address):
                    self.effects.append(Lookup(address))
                else:
                    del self.lookups[address]

    def is_needed(self, address: Address) -> bool:
        """True where transfers or declines wait for a connection."""
        return self._is_awaited(address) or address in self.declines

    def _send_bye(self, session: ReceiverSession) -> None:
        self.send(session, m.Bye())
        self.effects.append(Close(session.id))
