"""The peers of a rank: which page servers answer, and questions to them.

A thread introduces us to every page server that we hear of, and again after some seconds, to hear of further ones. Only
one that has answered is asked for pages. One that lets a question wait is left out at once, and introduced to again
after 1, 2, ... 60 seconds (a circuit breaker), so that no request waits for it meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import zmq

from ...common.api.unreadable import UNREADABLE
from ...common.kvcache.storage.page_servers import PageServers
from ..endpoint import control_socket
from ..protocol.authentication import TO_SENDER, AuthError, Channel, Secret
from . import messages as m

logger = logging.getLogger("baton.kvtransfer")

_INTRODUCE_SECONDS = 10.0
_ANSWER_SECONDS = 2.0
"""How long an introduction may take: it connects the transfer backend, and nobody waits for it."""
_POLL_MILLISECONDS = 100
_MAX_RETRY_SECONDS = 60.0
_MAX_FAILURES = 12
"""After as many, about eight minutes, one that we were not configured with is forgotten."""

Socket = zmq.Socket[bytes]
Question = m.Find | m.Fetch


class Link:
    """A connection to a page server, with a session of its own; of one thread at a time."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str, secret: Secret | None):
        session = secrets.token_hex(16).encode()
        self.socket = control_socket(context, zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, session)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE_BYTES)
        self.socket.connect(endpoint)
        self._channel = Channel(secret, session, TO_SENDER)

    def send(self, message: m.ToServer) -> None:
        self.socket.send_multipart(self._channel.sign(m.encode(message)), zmq.NOBLOCK)

    def receive(self) -> m.ToClient | None:
        """Returns the next message; None where none has arrived, or one that is not the server's."""
        try:
            return m.decode_to_client(self._channel.verify(self.socket.recv_multipart(zmq.NOBLOCK)))
        except (zmq.Again, AuthError, *UNREADABLE):
            return None

    def close(self) -> None:
        self.socket.close(linger=0)


@dataclass(eq=False)
class Peer:
    """A page server. ``holds`` and ``writes`` as in Introduced, valid while it ``is_up``."""

    endpoint: str
    is_static: bool
    is_up: bool = False
    is_ours: bool = False
    holds: str = ""
    writes: bool = False
    due: float = 0.0
    failures: int = 0
    num_introductions: int = 0
    strikes: int = 0
    """Questions in a row that it let wait; ``failures``: introductions."""
    link: Link | None = None
    answer_by: float | None = None
    """Of an introduction that is under way; with ``link`` and ``due`` of the thread that introduces us."""


class Peers:
    """Page servers of ``servers``, and ``static`` endpoints. ``introduction`` is what they are told; ``timeout``:
    seconds that a question may wait for a sign of life. ``ask`` may be called by several threads."""

    def __init__(self, servers: PageServers, static: Iterable[str], introduction: m.Introduce, holds: set[str],
                 secret: Secret | None, timeout: float):
        """``holds``: endings of the names of objects that are of use here."""
        self._servers, self._introduction, self._secret, self._timeout = servers, introduction, secret, timeout
        self._holds = holds
        self._context: zmq.Context[Socket] = zmq.Context()
        self._peers = {endpoint: Peer(endpoint, True) for endpoint in static}
        self._usable: tuple[Peer, ...] = ()
        self._links = threading.local()
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-page-peers", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Peers({', '.join(peer.endpoint for peer in self._usable) or 'none is up'})"

    @property
    def usable(self) -> tuple[Peer, ...]:
        """Those that answer, and hold pages that are of use to us."""
        return tuple(peer for peer in self._usable if peer.is_up)

    def next_number(self) -> int:
        return next(self._numbers)

    def ask(self, questions: Mapping[Peer, Question], handle: Callable[[Peer, m.ToClient], bool]) -> set[Peer]:
        """Asks all peers at once, and gives ``handle`` what each answers until that returns True. Returns those that
        did not answer, which are left out from now on."""
        links = {peer: self._link(peer) for peer in questions}
        for peer, question in questions.items():
            links[peer].send(question)
        deadlines = dict.fromkeys(questions, time.monotonic() + self._timeout)
        poller = zmq.Poller()
        for link in links.values():
            poller.register(link.socket, zmq.POLLIN)
        failed = set()
        while deadlines:
            wait = min(deadlines.values()) - time.monotonic()
            ready = {sock for sock, _ in poller.poll(max(0, int(wait * 1000) + 1))}
            now = time.monotonic()
            for peer in list(deadlines):
                if links[peer].socket in ready:
                    deadlines[peer] = now + self._timeout
                    if self._take(peer, links[peer], questions[peer].number, handle):
                        del deadlines[peer]
                        poller.unregister(links[peer].socket)
                elif deadlines[peer] <= now or self._closing.is_set():
                    failed.add(peer)
                    del deadlines[peer]
                    poller.unregister(links[peer].socket)
                    self._fail(peer)
        return failed

    def leave_out(self, peer: Peer, *, again: bool = False) -> None:
        """Does not ask a peer until it has been introduced to again: now (``again``), or after a while."""
        peer.is_up = False
        peer.due = 0.0 if again else time.monotonic() + min(2.0 ** peer.strikes, _MAX_RETRY_SECONDS)
        peer.strikes += not again

    def close(self) -> None:
        """No ``ask`` is in progress."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    # -- questions ----------------------------------------------------------------------------------------------------

    def _link(self, peer: Peer) -> Link:
        links = self._links.__dict__
        if peer.endpoint not in links:
            links[peer.endpoint] = Link(self._context, peer.endpoint, self._secret)
        link: Link = links[peer.endpoint]
        return link

    def _take(self, peer: Peer, link: Link, number: int, handle: Callable[[Peer, m.ToClient], bool]) -> bool:
        """Handles what has arrived; returns True with the last message of the answer."""
        while (message := link.receive()) is not None:
            if isinstance(message, m.Introduced | m.Going) or message.number != number:
                continue
            if handle(peer, message):
                peer.strikes = 0
                return True
        return False

    def _fail(self, peer: Peer) -> None:
        """In a thread that asks: leaves a peer out, and forgets the answer that may still come."""
        self._links.__dict__.pop(peer.endpoint).close()
        if peer.is_up:
            self.leave_out(peer)
            logger.warning("The page server %s does not answer: its pages are computed here. It is tried again from "
                           "time to time.", peer.endpoint)

    # -- the thread that introduces us ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            now = time.monotonic()
            for endpoint in self._servers.known:
                if endpoint not in self._peers:
                    self._peers[endpoint] = Peer(endpoint, False)
            for peer in list(self._peers.values()):
                self._advance(peer, now)
            self._usable = tuple(peer for peer in self._peers.values() if peer.is_up and peer.holds in self._holds)
            self._servers.reached = tuple(peer.endpoint for peer in self._peers.values() if peer.is_up)
            poller = zmq.Poller()
            waiting = {peer.link.socket: peer for peer in self._peers.values() if peer.link is not None}
            for sock in waiting:
                poller.register(sock, zmq.POLLIN)
            if not waiting:
                self._closing.wait(_POLL_MILLISECONDS / 1000)
            for sock, _ in poller.poll(_POLL_MILLISECONDS) if waiting else ():
                self._hear(waiting[sock])

    def _advance(self, peer: Peer, now: float) -> None:
        if peer.answer_by is not None:
            if now >= peer.answer_by:
                self._unanswered(peer, now)
        elif now >= peer.due and not peer.is_ours:
            try:
                if peer.link is None:
                    peer.link = Link(self._context, peer.endpoint, self._secret)
                peer.link.send(self._introduction)
                peer.answer_by = now + _ANSWER_SECONDS
            except zmq.ZMQError:  # what others told us is no endpoint
                self._unanswered(peer, now)

    def _unanswered(self, peer: Peer, now: float) -> None:
        peer.is_up, peer.answer_by = False, None
        if peer.link is not None:
            peer.link.close()
            peer.link = None
        peer.due = now + min(2.0 ** peer.failures, _MAX_RETRY_SECONDS)
        peer.failures += 1
        if peer.failures >= _MAX_FAILURES and not peer.is_static:
            self._servers.forget(peer.endpoint)
            del self._peers[peer.endpoint]

    def _hear(self, peer: Peer) -> None:
        assert peer.link is not None
        message = peer.link.receive()
        if not isinstance(message, m.Introduced):
            return
        peer.answer_by, peer.failures = None, 0
        peer.due = time.monotonic() + min(_INTRODUCE_SECONDS, 0.25 * 2.0 ** peer.num_introductions)
        peer.num_introductions = min(peer.num_introductions + 1, 10)
        peer.is_ours = message.instance == self._introduction.instance
        if peer.is_ours:
            peer.link.close()
            peer.link = None
            return
        if message.version != m.VERSION:
            return
        if not peer.is_up:
            logger.info("Pages of host memory are read from %s too", peer.endpoint)
        peer.holds, peer.writes, peer.is_up = message.holds, message.writes, True
        self._servers.add(message.servers)


def endpoint_of(address: str) -> str:
    """The endpoint of HOST:PORT. Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(address)
    return f"tcp://{host}:{port}"
