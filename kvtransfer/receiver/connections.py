"""The ways from a receiver to prefill servers: looked up, connected, used, and given up.

A *link* is our side of a session: one connection to one sender instance. It is never repaired. When it breaks, the
rooms published over it fail, and the next reservation looks the sender up anew, which is also how a restarted
prefill server behind the same address is found: its instance id differs. The links to all ranks of a prefill server
that we have lanes from make a *route*; a room is published over all of them, and done when each has sent its result.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ...common.api.errors import PairMismatch, ServingError, TransferFailed
from ..expiring import MAX_WAITING
from ..protocol import messages as m
from ..protocol.reshard import lane, writers_of
from ..protocol.timing import Timing
from .receiver_state import Address, Close, Connect, Effect, Link, Lookup, Route, Search, Send

RETRY_INTERVAL = 0.25


class Connections:
    """``hello`` is what we say of ourselves, to every sender with its instance; ``awaited`` tells whether rooms wait
    for a way to an address. What becomes of these rooms, and of those of a link, is the owner's business."""

    def __init__(self, hello: m.Hello, timing: Timing, effects: deque[Effect], awaited: Callable[[Address], bool]):
        self.hello = hello
        self.timing = timing
        self.effects = effects
        self.routes: dict[Address, Route] = {}  # the usable one to each prefill server, or the one that is to be
        self.links: dict[bytes, Link] = {}  # all whose connection stands
        self.searches: dict[Address, Search] = {}
        self.declines: dict[Address, deque[tuple[float, m.Decline]]] = {}  # with deadlines; no way there is known yet
        self._awaited = awaited
        self._told: dict[Address, str] = {}  # the instance there that has heard why it does not fit

    def __bool__(self) -> bool:
        """Whether anything here has a deadline."""
        return bool(self.links or self.searches or self.declines)

    @property
    def expecting(self) -> bool:
        """Whether anybody may be writing to us."""
        return any(link.rooms or not link.welcome for link in self.links.values())

    def send(self, link: Link, message: m.ToSender) -> None:
        self.effects.append(Send(link.id, message))

    def tell(self, link_id: bytes, message: m.ToSender) -> None:
        """Unless its connection is gone."""
        if (link := self.links.get(link_id)) is not None:
            self.send(link, message)

    # -- searches -------------------------------------------------------------------------------------------------

    def way_to(self, address: Address) -> Route | None:
        """The route to a server, if all of its ranks have welcomed us; without any it is searched for from now on."""
        route = self.routes.get(address)
        if route is not None:
            return route if route.welcome else None
        if address not in self.searches:
            self.searches[address] = Search()
            self.effects.append(Lookup(address))
        return None

    def connect(self, address: Address, ranks: Sequence[m.RankInfo], now: float) -> ServingError | None:
        """All ranks of the server at ``address`` were found, in order. Returns why there can be no way to them."""
        if not self.wanted(address) or address in self.routes:
            self.drop_search(address)
            return None
        ours = self.hello.info
        if len({rank.model for rank in ranks}) > 1:
            self.not_registered(address, "its weights are being replaced", now)
            return None
        why = next((why for rank in ranks if (why := ours.mismatch(rank)) is not None), None)
        if why is not None:
            self.drop_search(address)
            self._tell_misfit(address, ranks[0], now)
            return PairMismatch(m.misfit(why))
        route = self.routes[address] = Route({}, dp_size=ranks[0].dp_size)
        writers = writers_of(ours.rank, ranks[0].side, ours.side)
        for info in (info for info in ranks if info.rank in writers):
            way = lane(info.rank, ranks[0].side, ours.rank, ours.side)
            assert way is not None
            route.blocks, route.parts = way.dst_blocks, way.dst_parts  # equal of all
            link = self._open(address, info, now)
            route.links[link.id] = link
        return None

    def _open(self, address: Address, info: m.RankInfo, now: float) -> Link:
        link = Link(secrets.token_hex(16).encode(), address, info.instance, heard=now, last_pong=-float("inf"),
                    dp_rank=info.dp_rank)
        self.links[link.id] = link
        self.effects.append(Connect(link, _seen_from(address, info.endpoint)))
        self.send(link, msgspec.structs.replace(self.hello, expected=info.instance))
        return link

    def _tell_misfit(self, address: Address, info: m.RankInfo, now: float) -> None:
        """Say Hello all the same, once, on a link that is of no route: prefill's refusal puts it into its log, too."""
        if self._told.get(address) != info.instance:
            self._told[address] = info.instance
            self._open(address, info, now)

    def leads(self, link: Link) -> bool:
        """Whether the link is of the route that rooms for its address take."""
        route = self.routes.get(link.address)
        return route is not None and link.id in route.links

    def introduce(self, info: m.RankInfo) -> None:
        """Who we say that we are from now on."""
        self.hello = msgspec.structs.replace(self.hello, info=info)
        self._told.clear()

    def not_registered(self, address: Address, reason: str, now: float) -> None:
        """The bootstrap server answers, and its rank is still starting: try again until each room's deadline."""
        self._retry(address, reason, now).unreachable_since = None

    def unreachable(self, address: Address, reason: str, now: float) -> ServingError | None:
        """Nobody answers: try again for as long as a silent peer is tolerated. Then returns with what to give up."""
        search = self._retry(address, reason, now)
        if search.unreachable_since is None:
            search.unreachable_since = now
        if now - search.unreachable_since < self.timing.peer_timeout:
            return None
        self.drop_search(address)
        return TransferFailed(f"the prefill server at {address[0]}:{address[1]} cannot be reached: {reason}",
                              cause="unreachable")

    def drop_search(self, address: Address) -> None:
        self.searches.pop(address, None)

    def _retry(self, address: Address, reason: str, now: float) -> Search:
        search = self.searches.setdefault(address, Search())
        search.retry_at, search.reason = now + RETRY_INTERVAL, reason
        return search

    # -- words for rooms that were never published -------------------------------------------------------------------

    def decline(self, room: int, address: Address, error: ServingError, now: float) -> None:
        """Tell the senders there that nothing will be reserved for a room, at once or as soon as there is a way."""
        decline = m.Decline(room, error.code, error.message)
        if (route := self.way_to(address)) is not None:
            for link in route.links.values():
                self.send(link, decline)
            return
        waiting = self.declines.setdefault(address, deque(maxlen=MAX_WAITING))
        waiting.append((now + self.timing.bootstrap_timeout, decline))

    def deliver_declines(self, address: Address, route: Route) -> None:
        for _, decline in self.declines.pop(address, ()):
            for link in route.links.values():
                self.send(link, decline)

    def drop_declines(self, address: Address) -> None:
        """There is nobody to tell."""
        self.declines.pop(address, None)

    # -- links ----------------------------------------------------------------------------------------------------

    def welcomed(self, link: Link) -> Route | None:
        """The sender's Welcome has come. Returns the link's route where it is the last that was missing."""
        link.welcome = True
        route = self.routes.get(link.address)
        if route is None or link.id not in route.links or not route.welcome:
            return None
        self.drop_search(link.address)
        return route

    def lose(self, link: Link, now: float) -> None:
        """Its connection is gone."""
        del self.links[link.id]
        self.unroute(link, now)

    def unroute(self, link: Link, now: float) -> None:
        """A link has ended, or is given up: the other links of its route are used for what is under way, and closed."""
        route = self.routes.get(link.address)
        if route is None or link.id not in route.links:
            return
        del self.routes[link.address]
        for other in route.links.values():
            other.retired = True
        if self.wanted(link.address):
            # Not at once: a bootstrap server may still hold the route of a rank that has just died.
            self.searches.setdefault(link.address, Search()).retry_at = now + RETRY_INTERVAL / 5
        else:
            self.drop_search(link.address)

    def close_unused(self, link: Link) -> None:
        if (link.silent or link.retired) and not link.rooms:
            del self.links[link.id]
            self._say_goodbye(link)

    def close(self) -> None:
        for link in list(self.links.values()):
            self._say_goodbye(link)
        self.links.clear()
        self.routes.clear()

    def tick(self, now: float) -> None:
        """Look-ups that are to be tried again, and declines that need not be told any more."""
        for address, declines in list(self.declines.items()):
            while declines and declines[0][0] <= now:
                declines.popleft()
            if not declines:
                del self.declines[address]
        for address, search in list(self.searches.items()):
            if search.retry_at is not None and now >= search.retry_at:
                search.retry_at = None
                if self.wanted(address):
                    self.effects.append(Lookup(address))
                else:
                    del self.searches[address]

    def wanted(self, address: Address) -> bool:
        """Whether there is anything to be said there."""
        return self._awaited(address) or address in self.declines

    def _say_goodbye(self, link: Link) -> None:
        self.send(link, m.Bye())
        self.effects.append(Close(link.id))


def _seen_from(address: Address, endpoint: str) -> str:
    """Where to connect: a server that listens on all of its addresses is reached where its bootstrap server is."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(wildcard):
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            return f"tcp://{host}:{endpoint[len(wildcard):]}"
    return endpoint
