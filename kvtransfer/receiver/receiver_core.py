"""The receiver's half of the protocol, without I/O: calls, messages and the time go in, effects come out.

A room waits for a way to its sender (ways.py) and is published over it. From then on its life is told here: until its
result has come from every rank, or its pages are safe from all that might be writing into them (writers.py).
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Sequence

import numpy as np

from ...common.api.errors import DeadlineExceeded, InvalidRequest, PairMismatch, ServingError, TransferFailed
from ..failures import count_failure, fail, room_in_use
from ..notices import Notices
from ..protocol import messages as m
from ..protocol.authentication import OTHER_SECRET
from ..protocol.messages import Extent
from ..protocol.states import RECEIVER, Event, Phase, step
from ..protocol.timing import Timing
from .connections import Connections
from .receiver_state import Address, Close, Effect, Link, RecvRoom, Route, Trial, Verify


class ReceiverCore:
    """State of one receiver. Not thread-safe; ``effects`` fill up and are carried out by the owner, in order.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, info: m.RankInfo, timing: Timing, num_pages: int, metadata: bytes = b"",
                 checksum: Extent = "off", lingering: float = 0.0, spare_page: int | None = None):
        """``lingering`` is the backend's."""
        self.info = info
        self.timing = timing
        self.checksum = checksum
        self.lingering = lingering
        self.effects: deque[Effect] = deque()
        self.rooms: dict[int, RecvRoom] = {}
        self.ways = Connections(m.Hello(info, "", num_pages, metadata, checksum, spare_page), timing, self.effects,
                                lambda address: bool(self._waiting(address)) or self._tries(address))
        self.trials: dict[Address, Trial] = {}
        self._notices = Notices(self.effects)
        self.counters: dict[str, float] = {"kv_bytes_received": 0, "kv_transfers_done": 0, "kv_transfer_seconds": 0,
                                           "kv_messages_dropped": 0}
        self._stamps = itertools.count(secrets.randbits(48))

    # -- the scheduler's calls ------------------------------------------------------------------------------------

    def reserve(self, room: int, address: Address, prompt_digest: int, num_prompt_tokens: int, first_page: int,
                page_ids: np.ndarray, now: float, dp_rank: int | None = None) -> None:
        if room in self.rooms:
            raise room_in_use(room)
        assert len(page_ids) == self.info.layout.pages_for(num_prompt_tokens) - first_page, "a page for every gap"
        reserve = m.Reserve(room, next(self._stamps), prompt_digest, num_prompt_tokens, first_page,
                            m.pack_page_ids(page_ids))
        half = self.rooms[room] = RecvRoom(room, address, reserve, now, dp_rank=dp_rank)
        if (route := self.ways.way_to(address)) is not None:
            self._publish(half, route, now)

    def abort(self, room: int, error: ServingError, now: float) -> None:
        if (half := self.rooms.get(room)) is not None:
            if half.phase is Phase.RESERVING:
                self.ways.decline(room, half.address, error, now)
            self._fail(half, error, now)

    def taken(self, room: int) -> None:
        """Tell the senders of a room that is DONE that they need not keep anything for another attempt."""
        half = self.rooms[room]
        assert half.phase is Phase.DONE, "taken before the room is done"
        for link_id in half.writers.instances:
            self.ways.tell(link_id, m.Taken(room, half.reserve.stamp))

    def forget(self, room: int) -> None:
        assert self.rooms[room].phase.terminal, "forget before the room has ended"
        del self.rooms[room]

    # -- without a room -------------------------------------------------------------------------------------------

    def connect(self, address: Address, now: float) -> None:
        """Seek a way to a sender before a room needs it; ``trials`` tells what comes of it."""
        trial = self.trials[address] = Trial(now + self.timing.bootstrap_timeout)
        trial.done = self.ways.way_to(address) is not None

    def leave(self, now: float) -> None:
        """End all sessions: our cache is going to be of other weights. No room is open."""
        self.ways.close()
        for address in {*self.trials, *self.ways.searches}:
            self.ways.drop_search(address)
            self._fail_waiting(address, TransferFailed("the decode server's weights are being replaced",
                                                       cause="weights"), now)

    def join(self, info: m.RankInfo) -> None:
        """What we say of ourselves from now on."""
        self.info = info
        self.ways.introduce(info)

    def _tries(self, address: Address) -> bool:
        return address in self.trials and not self.trials[address].done

    # -- what a look-up brings ------------------------------------------------------------------------------------

    def found(self, address: Address, ranks: Sequence[m.RankInfo], now: float) -> None:
        """All ranks of the server at ``address``, in order."""
        for half in self.rooms.values():
            if half.address == address and half.phase is Phase.ABORTING:
                half.writers.outlived({rank.instance for rank in ranks}, now, self.lingering, self.timing.landing)
        if (error := self.ways.connect(address, ranks, now)) is not None:
            self._fail_waiting(address, error, now)

    def unreachable(self, address: Address, reason: str, now: float) -> None:
        """Nobody answers."""
        if (error := self.ways.unreachable(address, reason, now)) is not None:
            self._fail_waiting(address, error, now)

    def refused(self, address: Address, reason: str, now: float) -> None:
        """The bootstrap server will not answer us, now or later."""
        self.ways.drop_search(address)
        self._fail_waiting(address, PairMismatch(
            f"the prefill server at {address[0]}:{address[1]} is not of this cluster: {reason}", cause="refused"), now)

    # -- the channel's events -------------------------------------------------------------------------------------

    def unreadable(self, link_id: bytes, now: float, *, unsealed: bool) -> None:
        """Something else than a message of ours came; ``unsealed``: without a seal that we can verify."""
        self.counters["kv_messages_dropped"] += 1
        link = self.ways.links.get(link_id)
        if unsealed and link is not None and not link.welcome:
            self._refused(link, m.Refused(OTHER_SECRET, unfit=True), now)

    def receive(self, link_id: bytes, message: m.ToReceiver, now: float) -> None:
        link = self.ways.links.get(link_id)
        if link is None:
            self.counters["kv_messages_dropped"] += 1
            return
        link.heard = now
        if isinstance(message, m.Ping):
            if not link.silent:  # a Pong would confirm a session that we have given up
                link.last_pong = now
                self.ways.send(link, m.Pong(message.time))
        elif isinstance(message, m.Welcome):
            self._welcome(link, message, now)
        elif isinstance(message, m.Refused):
            self._refused(link, message, now)
        elif isinstance(message, m.Gone):
            error = TransferFailed(f"the prefill server ended the session: {message.message}", cause="ended")
            self._break(link, error, now, quiet_at=now + self.timing.landing)
            self.effects.append(Close(link.id))
        else:
            self._about_room(link, message, now)

    def disconnected(self, link_id: bytes, now: float) -> None:
        """The connection is closed; the owner has no socket for it any more."""
        if (link := self.ways.links.get(link_id)) is None:
            return
        error = TransferFailed("the connection to the prefill server was lost", cause="connection_lost")
        torn_down = max(now, link.last_pong + self.timing.peer_timeout)
        led = self.ways.leads(link)
        self._break(link, error, now, quiet_at=torn_down + self.timing.landing)
        if led and not link.welcome and self.ways.wanted(link.address):
            self.unreachable(link.address, "its engine does not accept connections", now)

    def look(self, half: RecvRoom, bells: np.ndarray, now: float) -> None:
        """Whether the last pages of a room have landed, before its Result tells: see messages.Landing."""
        for link_id, told in half.landed(bells):
            link = self.ways.links.get(link_id)
            if half.phase is Phase.RESERVED and link is not None and half.room in link.rooms:
                link.landed.add(told.stamp)
                half.accept(told.result)
                self._quiet(half, link_id, now)

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
        for link in list(self.ways.links.values()):
            link.heard = min(now, link.heard + self.timing.forgiven(stalled))
            if not link.silent and now - link.heard > self.timing.silence:
                self._silence(link, now)
            self.ways.close_unused(link)
        for half in list(self.rooms.values()):
            self._check_deadlines(half, now)
        for address, trial in self.trials.items():
            if not trial.done and now >= trial.deadline:
                search = self.ways.searches.get(address)
                trial.done, trial.error = True, DeadlineExceeded(
                    f"decode found no way to the prefill server at {address[0]}:{address[1]} within "
                    f"{self.timing.bootstrap_timeout:g} s" + (f": {search.reason}" if search else ""))
        self.ways.tick(now)

    @property
    def idle(self) -> bool:
        """Nothing has a deadline."""
        return not (self.rooms or self.ways)

    def shut_down(self, now: float) -> None:
        """Say goodbye. Our memory goes away with us, so nothing waits for the writers."""
        for half in list(self.rooms.values()):
            self._fail(half, TransferFailed("the decode server shut down", cause="shutdown"), now)
        self.ways.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _waiting(self, address: Address) -> list[RecvRoom]:
        return [half for half in self.rooms.values() if half.phase is Phase.RESERVING and half.address == address]

    def _fail_waiting(self, address: Address, error: ServingError, now: float) -> None:
        self.ways.drop_declines(address)
        if isinstance(error, PairMismatch):
            self._notices.warn(f"Prefill server {address[0]}:{address[1]} is not used: {error.message}.")
        if self._tries(address):
            self.trials[address].done, self.trials[address].error = True, error
        for half in self._waiting(address):
            self._fail(half, error, now)

    def _publish(self, half: RecvRoom, route: Route, now: float) -> None:
        links = route.links_of(half)
        if not links:
            self._fail(half, InvalidRequest(f"The prefill server has no data-parallel rank {half.dp_rank}, only "
                                            f"{route.dp_size} of them.", param="disagg_prefill_dp_rank"), now)
            return
        half.publish(route, links)
        for link in links:
            self.ways.send(link, half.reserve)

    def _welcome(self, link: Link, welcome: m.Welcome, now: float) -> None:
        if link.silent or welcome.instance != link.instance:
            self.counters["kv_messages_dropped"] += 1
        elif not self.ways.leads(link):
            link.retired = True
        elif (route := self.ways.welcomed(link)) is not None:
            if self._tries(link.address):
                self.trials[link.address].done = True
            for half in self._waiting(link.address):
                self._publish(half, route, now)
            self.ways.deliver_declines(link.address, route)

    def _refused(self, link: Link, refused: m.Refused, now: float) -> None:
        error = (PairMismatch if refused.unfit else TransferFailed)(refused.message, cause="refused")
        if not refused.restarted and self.ways.leads(link):
            self._fail_waiting(link.address, error, now)
        self._break(link, error, now, quiet_at=now)
        self.effects.append(Close(link.id))

    def _about_room(self, link: Link, message: m.Landing | m.Result | m.Abort | m.Stopped, now: float) -> None:
        half = link.rooms.get(message.room)
        if message.stamp in link.landed:  # it has ended here already
            if not isinstance(message, m.Abort):
                link.landed.remove(message.stamp)
        elif half is None or half.reserve.stamp != message.stamp:
            self.counters["kv_messages_dropped"] += 1
        elif isinstance(message, m.Abort):
            self._fail(half, message.error, now, told_by=link.id)
        elif isinstance(message, m.Stopped):
            if half.phase is Phase.RESERVED:
                self._fail(half, TransferFailed("the prefill server stopped writing"), now, told_by=link.id)
            self._quiet(half, link.id, now)
        elif message.instance != link.instance:
            self.counters["kv_messages_dropped"] += 1
        elif isinstance(message, m.Landing):
            if self.checksum == "off":
                half.landings[link.id] = message
        else:
            half.accept(message.result, message.checksum)
            self._quiet(half, link.id, now)

    def _quiet(self, half: RecvRoom, link_id: bytes, now: float) -> None:
        """Nothing is written over this link any more. When that is true of all, the room ends."""
        if (link := self.ways.links.get(link_id)) is not None:
            link.rooms.pop(half.room, None)
        if not half.writers.stopped(link_id):
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
        self.ways.lose(link, now)
        for half in list(link.rooms.values()):
            half.writers.lost(link.id, quiet_at + self.lingering)
            self._fail(half, error, now, told_by=link.id)

    def _silence(self, link: Link, now: float) -> None:
        link.silent = True
        error = TransferFailed(f"the prefill server was silent for {self.timing.peer_timeout:g} s", cause="silent")
        for half in list(link.rooms.values()):
            self._fail(half, error, now)
        if not link.welcome and self.ways.leads(link):  # it never answered: whoever listens there is no live sender
            self._fail_waiting(link.address, error, now)
        self.ways.unroute(link, now)

    def _check_deadlines(self, half: RecvRoom, now: float) -> None:
        search = self.ways.searches.get(half.address)
        if (error := half.overdue(now, self.timing, "" if search is None else search.reason)) is not None:
            self._fail(half, error, now)
        elif half.phase is Phase.ABORTING:
            for link_id in half.writers.overdue(now):
                self._quiet(half, link_id, now)

    def _fail(self, half: RecvRoom, error: ServingError, now: float, *, told_by: bytes | None = None) -> None:
        if not fail(half, RECEIVER, error):
            return
        if half.phase is Phase.FAILED:
            self._ended(half, now)
        for link_id in half.writers.pending:
            if link_id != told_by:
                self.ways.tell(link_id, m.Abort(half.room, half.reserve.stamp, error.code, error.message))

    def _ended(self, half: RecvRoom, now: float) -> None:
        if half.phase is Phase.DONE:
            num_pages = len(half.reserve.page_ids) // 4
            self.counters["kv_bytes_received"] += num_pages * self.info.layout.page_bytes
            self.counters["kv_transfers_done"] += 1
            self.counters["kv_transfer_seconds"] += now - half.began
        else:
            assert half.error is not None
            count_failure(self.counters, half.error)
