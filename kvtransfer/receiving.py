"""The receiver's half of the protocol, without I/O: calls, messages and the time go in, effects come out.

A *link* is our side of a session: one connection to one sender instance. It is never repaired. When it breaks, the
rooms published over it fail, and the next reservation looks the sender up anew, which is also how a restarted
prefill server behind the same address is found: its instance id differs. The links to all ranks of a prefill server
that we have lanes from make a *route*; a room is published over all of them, and done when each has sent its result.

When a published room fails, its pages wait until the writer is quiet (see states.py):

* The link works: until the sender answers our Abort with Stopped (or its result crosses the Abort).
* The link is closed (the process ended, or the network is cut): until ``peer_timeout`` after our last Pong, when the
  sender must have torn its writes down (see sessions.py), and ``landing`` more. When the sender itself has dismissed
  us, it has just done so, and ``landing`` is enough.
  Where the backend cannot take writes back, for as long as they linger in addition, or until another instance of the
  sender's answers at its address.
* The link is silent, yet its connection stands (the process is stopped): a stopped process may resume in the middle of
  a write at any time, so only its answer, or the end of its connection, frees the pages. Their error is known at once.

One assumption remains: what closes the connection of a process *while it is stopped* (a network cut, a dead host) also
breaks the path of its data, so that a write which it had begun cannot go on when it resumes.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Sequence

import numpy as np

from ..common.api.errors import Conflict, DeadlineExceeded, InvalidRequest, ServingError, TransferFailed
from . import messages as m
from .checksum import Extent
from .failures import count_failure
from .lanes import lane, writers_of
from .recv_state import Address, Close, Connect, Effect, Link, Lookup, RecvRoom, Route, Search, Send, Verify
from .seal import OTHER_SECRET
from .states import RECEIVER, Event, Phase, step
from .timing import Timing
from .waiting import MAX_WAITING

RETRY_INTERVAL = 0.25


class ReceiverCore:
    """State of one receiver. Not thread-safe; ``effects`` fill up and are carried out by the owner, in order.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, info: m.RankInfo, timing: Timing, num_pages: int, metadata: bytes = b"",
                 checksum: Extent = "off", lingering: float = 0.0):
        """``lingering`` is the backend's."""
        self.info = info
        self.timing = timing
        self.num_pages = num_pages
        self.metadata = metadata
        self.checksum = checksum
        self.lingering = lingering
        self.effects: deque[Effect] = deque()
        self.rooms: dict[int, RecvRoom] = {}
        self.routes: dict[Address, Route] = {}  # the usable one to each prefill server
        self.links: dict[bytes, Link] = {}  # all whose connection stands
        self.searches: dict[Address, Search] = {}
        self.declines: dict[Address, deque[tuple[float, m.Decline]]] = {}  # with deadlines; no way there is known yet
        self.counters: dict[str, float] = {"kv_bytes_received": 0, "kv_transfers_done": 0, "kv_transfer_seconds": 0,
                                           "kv_messages_dropped": 0}
        self._stamps = itertools.count(secrets.randbits(48))

    # -- the scheduler's calls ------------------------------------------------------------------------------------

    def reserve(self, room: int, address: Address, prompt_digest: int, num_prompt_tokens: int, first_page: int,
                page_ids: np.ndarray, now: float, dp_rank: int | None = None) -> None:
        if room in self.rooms:
            raise Conflict(f"bootstrap_room {room} is in use; every request needs a room of its own.")
        assert len(page_ids) == self.info.layout.pages_for(num_prompt_tokens) - first_page, "a page for every gap"
        reserve = m.Reserve(room, next(self._stamps), prompt_digest, num_prompt_tokens, first_page,
                            m.pack_page_ids(page_ids))
        half = self.rooms[room] = RecvRoom(room, address, reserve, now, dp_rank=dp_rank)
        route = self.routes.get(address)
        if route is not None and route.welcome:
            self._publish(half, route, now)
        elif route is None and address not in self.searches:
            self._search(address)

    def abort(self, room: int, error: ServingError, now: float) -> None:
        if (half := self.rooms.get(room)) is not None:
            if half.phase is Phase.RESERVING:
                self.decline(room, half.address, error, now)
            self._fail(half, error, now)

    def decline(self, room: int, address: Address, error: ServingError, now: float) -> None:
        """Tell the sender at once, or as soon as there is a way to it, that nothing will be reserved for a room."""
        decline = m.Decline(room, error.code, error.message)
        route = self.routes.get(address)
        if route is not None and route.welcome:
            for link in route.links.values():
                self._send(link, decline)
            return
        waiting = self.declines.setdefault(address, deque(maxlen=MAX_WAITING))
        waiting.append((now + self.timing.bootstrap_timeout, decline))
        if route is None and address not in self.searches:
            self._search(address)

    def taken(self, room: int) -> None:
        """Tell the senders of a room that is DONE that they need not keep anything for another attempt."""
        half = self.rooms[room]
        assert half.phase is Phase.DONE, "taken before the room is done"
        for link_id in half.published_over:
            if (link := self.links.get(link_id)) is not None:
                self._send(link, m.Taken(room, half.reserve.stamp))

    def forget(self, room: int) -> None:
        assert self.rooms[room].phase.terminal, "forget before the room has ended"
        del self.rooms[room]

    # -- the way to a sender --------------------------------------------------------------------------------------

    def found(self, address: Address, ranks: Sequence[m.RankInfo], now: float) -> None:
        """All ranks of the server at ``address``, in order."""
        self._end_lingering(address, {rank.instance for rank in ranks}, now)
        if not self._wanted(address):
            self.searches.pop(address, None)
            return
        why = next((why for rank in ranks if (why := self.info.mismatch(rank)) is not None), None)
        if why is not None:
            self.searches.pop(address, None)
            self._fail_waiting(address, TransferFailed(
                f"prefill and decode do not fit together: {why} (decode, prefill)", cause="mismatch"), now)
            return
        route = self.routes[address] = Route({}, dp_size=ranks[0].dp_size)
        writers = writers_of(self.info.rank, ranks[0].side, self.info.side)
        for info in (info for info in ranks if info.rank in writers):
            way = lane(info.rank, ranks[0].side, self.info.rank, self.info.side)
            assert way is not None
            route.blocks, route.parts = way.dst_blocks, way.dst_parts  # equal of all
            link = Link(secrets.token_hex(16).encode(), address, info.instance, heard=now, last_pong=-float("inf"),
                        dp_rank=info.dp_rank)
            route.links[link.id] = self.links[link.id] = link
            self.effects.append(Connect(link, _seen_from(address, info.endpoint)))
            self._send(link, m.Hello(self.info, info.instance, self.num_pages, self.metadata, self.checksum))

    def not_registered(self, address: Address, reason: str, now: float) -> None:
        """The bootstrap server answers, and its rank is still starting: try again until each room's deadline."""
        search = self.searches.setdefault(address, Search())
        search.retry_at, search.reason, search.unreachable_since = now + RETRY_INTERVAL, reason, None

    def unreachable(self, address: Address, reason: str, now: float) -> None:
        """Nobody answers: try again for as long as a silent peer is tolerated, then fail what waits."""
        search = self.searches.setdefault(address, Search())
        search.retry_at, search.reason = now + RETRY_INTERVAL, reason
        if search.unreachable_since is None:
            search.unreachable_since = now
        if now - search.unreachable_since >= self.timing.peer_timeout:
            del self.searches[address]
            self._fail_waiting(address, TransferFailed(
                f"the prefill server at {address[0]}:{address[1]} cannot be reached: {reason}",
                cause="unreachable"), now)

    def refused(self, address: Address, reason: str, now: float) -> None:
        """The bootstrap server will not answer us, now or later."""
        self.searches.pop(address, None)
        self._fail_waiting(address, TransferFailed(
            f"the prefill server at {address[0]}:{address[1]} is not of this cluster: {reason}",
            cause="refused"), now)

    # -- the channel's events -------------------------------------------------------------------------------------

    def unreadable(self, link_id: bytes, now: float, *, unsealed: bool) -> None:
        """Something else than a message of ours came; ``unsealed``: without a seal that we can verify."""
        self.counters["kv_messages_dropped"] += 1
        link = self.links.get(link_id)
        if unsealed and link is not None and not link.welcome:
            self._refused(link, m.Refused(OTHER_SECRET), now)

    def receive(self, link_id: bytes, message: m.ToReceiver, now: float) -> None:
        link = self.links.get(link_id)
        if link is None:
            self.counters["kv_messages_dropped"] += 1
            return
        link.heard = now
        if isinstance(message, m.Ping):
            if not link.silent:  # a Pong would confirm a session that we have given up
                link.last_pong = now
                self._send(link, m.Pong(message.time))
        elif isinstance(message, m.Welcome):
            self._welcome(link, message, now)
        elif isinstance(message, m.Refused):
            self._refused(link, message, now)
        elif isinstance(message, m.Gone):
            self._break(link, TransferFailed(f"the prefill server ended the session: {message.message}",
                                             cause="ended"), now,
                        quiet_at=now + self.timing.landing)
            self.effects.append(Close(link.id))
        else:
            self._about_room(link, message, now)

    def disconnected(self, link_id: bytes, now: float) -> None:
        """The connection is closed; the owner has no socket for it any more."""
        if (link := self.links.get(link_id)) is not None:
            self._break(link, TransferFailed(
                "the connection to the prefill server was lost", cause="connection_lost"), now,
                        quiet_at=max(now, link.last_pong + self.timing.peer_timeout) + self.timing.landing)
            if not link.welcome and self._wanted(link.address):
                self.unreachable(link.address, "its engine does not accept connections", now)

    def verified(self, half: RecvRoom, matches: bool, now: float) -> None:
        """The room's pages were compared with the sender's. Its result has proven that nothing is written any more."""
        if half.phase.terminal:
            return
        if not matches:
            self._fail(half, TransferFailed(
                "the KV cache arrived damaged: its checksum differs from the prefill server's", cause="damaged"), now)
        self._completed(half, now)

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float, stalled: float = 0.0) -> None:
        """Deadlines. ``stalled``: seconds that we ourselves did not run, which are not the peers' silence."""
        for link in list(self.links.values()):
            link.heard = min(now, link.heard + self.timing.forgiven(stalled))
            if not link.silent and now - link.heard > self.timing.peer_timeout:
                self._silence(link, now)
            if (link.silent or link.retired) and not link.rooms:
                del self.links[link.id]
                self._send(link, m.Bye())
                self.effects.append(Close(link.id))
        for half in list(self.rooms.values()):
            self._check_deadlines(half, now)
        for address, declines in list(self.declines.items()):
            while declines and declines[0][0] <= now:
                declines.popleft()
            if not declines:
                del self.declines[address]
        for address, search in list(self.searches.items()):
            if search.retry_at is not None and now >= search.retry_at:
                search.retry_at = None
                if self._wanted(address):
                    self.effects.append(Lookup(address))
                else:
                    del self.searches[address]

    @property
    def idle(self) -> bool:
        """Nothing has a deadline."""
        return not (self.rooms or self.links or self.searches or self.declines)

    @property
    def expecting(self) -> bool:
        """Whether anybody may be writing to us."""
        return any(link.rooms for link in self.links.values())

    def shut_down(self, now: float) -> None:
        """Say goodbye. Our memory goes away with us, so nothing waits for the writers."""
        for half in list(self.rooms.values()):
            self._fail(half, TransferFailed("the decode server shut down", cause="shutdown"), now)
        for link in list(self.links.values()):
            self._send(link, m.Bye())
            self.effects.append(Close(link.id))
        self.links.clear()
        self.routes.clear()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _send(self, link: Link, message: m.ToSender) -> None:
        self.effects.append(Send(link.id, message))

    def _search(self, address: Address) -> None:
        self.searches[address] = Search()
        self.effects.append(Lookup(address))

    def _waiting(self, address: Address) -> list[RecvRoom]:
        return [half for half in self.rooms.values() if half.phase is Phase.RESERVING and half.address == address]

    def _end_lingering(self, address: Address, alive: set[str], now: float) -> None:
        """Where others answer in place of instances, those are dead, and their hosts send no more for them."""
        for half in self.rooms.values():
            if half.address != address or half.phase is not Phase.ABORTING:
                continue
            for link_id, quiet_at in half.writers.items():
                if quiet_at is not None and half.published_over[link_id] not in alive:
                    half.writers[link_id] = min(quiet_at, max(now, quiet_at - self.lingering) + self.timing.landing)

    def _wanted(self, address: Address) -> bool:
        return bool(self._waiting(address) or address in self.declines)

    def _fail_waiting(self, address: Address, error: ServingError, now: float) -> None:
        self.declines.pop(address, None)
        for half in self._waiting(address):
            self._fail(half, error, now)

    def _publish(self, half: RecvRoom, route: Route, now: float) -> None:
        links = route.links_of(half)
        if not links:
            self._fail(half, InvalidRequest(f"The prefill server has no data-parallel rank {half.dp_rank}, only "
                                            f"{route.dp_size} of them.", param="disagg_prefill_dp_rank"), now)
            return
        half.phase = step(RECEIVER, half.phase, Event.PUBLISH)
        half.blocks, half.parts = route.blocks, route.parts
        half.published_over = {link.id: link.instance for link in links}
        for link in links:
            half.writers[link.id] = None
            link.rooms[half.room] = half
            self._send(link, half.reserve)

    def _welcome(self, link: Link, welcome: m.Welcome, now: float) -> None:
        if link.silent or welcome.instance != link.instance:
            self.counters["kv_messages_dropped"] += 1
            return
        link.welcome = True
        route = self.routes.get(link.address)
        if route is not None and link.id in route.links and route.welcome:
            self.searches.pop(link.address, None)
            for half in self._waiting(link.address):
                self._publish(half, route, now)
            for _, decline in self.declines.pop(link.address, ()):
                for other in route.links.values():
                    self._send(other, decline)

    def _refused(self, link: Link, refused: m.Refused, now: float) -> None:
        error = TransferFailed(refused.message, cause="refused")
        if not refused.restarted:
            self._fail_waiting(link.address, error, now)
        self._break(link, error, now, quiet_at=now)
        self.effects.append(Close(link.id))

    def _about_room(self, link: Link, message: m.Result | m.Abort | m.Stopped, now: float) -> None:
        half = link.rooms.get(message.room)
        if half is None or half.reserve.stamp != message.stamp:
            self.counters["kv_messages_dropped"] += 1
        elif isinstance(message, m.Abort):
            self._fail(half, message.error, now, told_by=link.id)
        elif isinstance(message, m.Stopped):
            if half.phase is Phase.RESERVED:
                self._fail(half, TransferFailed("the prefill server stopped writing"), now, told_by=link.id)
            self._quiet(half, link.id, now)
        elif message.instance != link.instance:
            self.counters["kv_messages_dropped"] += 1
        else:
            half.result = message.result.told_before(half.result)  # first, for the same reason as in _fail
            half.checksum = (half.checksum + message.checksum) % 2**64
            self._quiet(half, link.id, now)

    def _quiet(self, half: RecvRoom, link_id: bytes, now: float) -> None:
        """Nothing is written over this link any more. When that is true of all, the room ends."""
        del half.writers[link_id]
        if (link := self.links.get(link_id)) is not None:
            link.rooms.pop(half.room, None)
        if half.writers:
            return
        if half.phase is Phase.ABORTING:
            half.phase = step(RECEIVER, half.phase, Event.QUIET)
            self._ended(half, now)
        elif self.checksum == "off":
            self._completed(half, now)
        else:
            self.effects.append(Verify(half))

    def _completed(self, half: RecvRoom, now: float) -> None:
        half.phase = step(RECEIVER, half.phase, Event.COMPLETE)
        self._ended(half, now)

    def _break(self, link: Link, error: ServingError, now: float, *, quiet_at: float) -> None:
        """The connection is gone: what was published waits until ``quiet_at``, and for writes that linger; the rest
        tries a new link."""
        del self.links[link.id]
        for half in list(link.rooms.values()):
            half.writers[link.id] = quiet_at + self.lingering
            self._fail(half, error, now, told_by=link.id)
        self._unroute(link, now)

    def _silence(self, link: Link, now: float) -> None:
        link.silent = True
        error = TransferFailed(f"the prefill server was silent for {self.timing.peer_timeout:g} s", cause="silent")
        for half in list(link.rooms.values()):
            self._fail(half, error, now)
        if not link.welcome:  # it never answered: whoever listens there is no live sender
            self._fail_waiting(link.address, error, now)
        self._unroute(link, now)

    def _unroute(self, link: Link, now: float) -> None:
        route = self.routes.get(link.address)
        if route is None or link.id not in route.links:
            return
        del self.routes[link.address]
        for other in route.links.values():
            other.retired = True
        if self._wanted(link.address):
            # Not at once: a bootstrap server may still hold the route of a rank that has just died.
            self.searches.setdefault(link.address, Search()).retry_at = now + RETRY_INTERVAL / 5
        else:
            self.searches.pop(link.address, None)

    def _check_deadlines(self, half: RecvRoom, now: float) -> None:
        timing = self.timing
        if half.phase is Phase.RESERVING and now >= half.began + timing.bootstrap_timeout:
            search = self.searches.get(half.address)
            because = f": {search.reason}" if search is not None and search.reason else ""
            self._fail(half, DeadlineExceeded(
                f"decode found no way to the prefill server at {half.address[0]}:{half.address[1]} within "
                f"{timing.bootstrap_timeout:g} s{because}"), now)
        elif half.phase is Phase.RESERVED and now >= half.began + timing.transfer_timeout:
            self._fail(half, DeadlineExceeded(
                f"the KV cache did not arrive within {timing.transfer_timeout:g} s (--kv-transfer-timeout)"), now)
        elif half.phase is Phase.ABORTING:
            for link_id, quiet_at in list(half.writers.items()):
                if quiet_at is not None and now >= quiet_at:
                    self._quiet(half, link_id, now)

    def _fail(self, half: RecvRoom, error: ServingError, now: float, *, told_by: bytes | None = None) -> None:
        after = step(RECEIVER, half.phase, Event.FAIL)
        if half.phase is after:
            return
        # Readers take no lock: whoever sees the phase must find the error.
        half.error, half.phase = error, after
        if half.phase is Phase.FAILED:
            self._ended(half, now)
        for link_id in half.writers:
            if link_id != told_by and (link := self.links.get(link_id)) is not None:
                self._send(link, m.Abort(half.room, half.reserve.stamp, error.code, error.message))

    def _ended(self, half: RecvRoom, now: float) -> None:
        if half.phase is Phase.DONE:
            num_pages = len(half.reserve.page_ids) // 4
            self.counters["kv_bytes_received"] += num_pages * self.info.layout.page_bytes
            self.counters["kv_transfers_done"] += 1
            self.counters["kv_transfer_seconds"] += now - half.began
        else:
            assert half.error is not None
            count_failure(self.counters, half.error)


def _seen_from(address: Address, endpoint: str) -> str:
    """Where to connect: a server that listens on all of its addresses is reached where its bootstrap server is."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(wildcard):
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            return f"tcp://{host}:{endpoint[len(wildcard):]}"
    return endpoint
