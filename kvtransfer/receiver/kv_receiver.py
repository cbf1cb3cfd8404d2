"""The decode side of KV transfers: one KVReceiver for each decode rank."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import zmq
import zmq.utils.monitor
from msgspec.structs import replace

from ...common.api.errors import ServingError
from ...common.api.identity import ModelIdentity
from ...common.api.unreadable import UNREADABLE
from ...common.config.server import DisaggregationArgs
from ...common.kvcache.layout import KVLayout
from ..backends.base import Backend
from ..bootstrap import NotRegistered, OtherSecret, fetch_ranks
from ..checksum import extent_of, make_checksum, places_of
from ..driver import Driver
from ..endpoint import PairKey, control_socket, rank_info, receive_all, register_pool
from ..notices import Warn
from ..protocol.authentication import OTHER_SECRET, TO_SENDER, AuthError, Channel, secret_of
from ..protocol.messages import PrefillResult, RankInfo, decode_to_receiver, encode, unpack_page_ids
from ..protocol.reshard import expand, parts_of
from ..protocol.states import Phase
from ..protocol.timing import Timing
from .receiver_core import ReceiverCore
from .receiver_state import Address, Close, Connect, Effect, Lookup, RecvRoom, Send, Trial, Verify

logger = logging.getLogger("baton.kvtransfer")

Socket = zmq.Socket[bytes]


class KVReceiver:
    """Reserves pages for prompts with the prefill ranks that compute them, and waits for their content.

    The keywords are KVSender's; ``host`` is not used for listening, since a receiver only connects. All methods but
    the constructor and ``close`` return at once and may be called from any thread. Raises ConfigError when the backend
    refuses the memory.
    """

    def __init__(self, *, args: DisaggregationArgs, host: str, rank: int, tp_size: int, layout: KVLayout,
                 num_pages: int, regions: list[tuple[int, int, int]], backend: Backend, dp_rank: int = 0,
                 dp_size: int = 1, model: ModelIdentity | None = None, server: str = "",
                 spare_page: int | None = None):
        named = register_pool(backend, layout, num_pages, regions)
        self._checksum = make_checksum(named, num_pages)
        self._extent = extent_of(args.kv_checksum, named)
        self._backend = backend
        self._bells = backend.bells()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._secret = secret_of(args.cluster_secret)
        self._timing = Timing.of(args)
        self.info: RankInfo = rank_info(endpoint="", rank=rank, tp_size=tp_size, layout=layout, backend=backend,
                                        dp_rank=dp_rank, dp_size=dp_size, model=model, server=server)
        self._pair_key = PairKey(args.cluster_secret, backend, regions)
        self._core = ReceiverCore(self.info, self._timing, num_pages, backend.local_metadata(), self._extent,
                                  backend.lingering, spare_page)
        self._driver = Driver(f"kv-receiver-{rank}", self._core, self._timing, self._work, self._carry_out)
        self._sockets: dict[bytes, Socket] = {}
        self._monitors: dict[bytes, Socket] = {}
        self._channels: dict[bytes, Channel] = {}
        self._lookups = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kv-route")
        self._driver.io.start()

    # -- rooms ----------------------------------------------------------------------------------------------------

    def reserve(self, room: int, peer: Address, prompt_digest: int, num_prompt_tokens: int, first_page: int,
                page_ids: np.ndarray, dp_rank: int | None = None) -> None:
        """Our pages ``page_ids [n]`` are to take the prompt's pages from ``first_page`` on (n may be 0).

        ``peer`` is host and port of the prefill server's bootstrap server, ``dp_rank`` which of its data-parallel ranks
        computes the prompt: without it, the one that the room leads to (room modulo their number). Its look-up and the
        connection are made in the background. Raises Conflict when the room is in use.
        """
        self._driver.io.check()
        with self._driver as core:
            core.reserve(room, peer, prompt_digest, num_prompt_tokens, first_page, page_ids, time.monotonic(), dp_rank)

    def phase(self, room: int) -> Phase:
        self._driver.io.check()
        half = self._core.rooms[room]
        if half.landings and self._bells is not None:
            with self._driver.lock:
                self._core.look(half, self._bells, time.monotonic())
        return half.phase

    def error(self, room: int) -> ServingError:
        """Why the room failed; valid in ABORTING (the pages are not free yet) and FAILED."""
        error = self._core.rooms[room].error
        assert error is not None, "the room has not failed"
        return error

    def result(self, room: int) -> PrefillResult:
        """The first token and what belongs to it; valid in DONE."""
        half = self._core.rooms[room]
        assert half.phase is Phase.DONE and half.result is not None, "the room is not done"
        return half.result

    def taken(self, room: int) -> None:
        """The first token of a room that is DONE is on its way to the client: prefill may forget the request."""
        with self._driver as core:
            core.taken(room)

    def abort(self, room: int, error: ServingError) -> None:
        """Fail a room and tell prefill. It is FAILED once no write can land any more. Harmless when it has ended."""
        with self._driver as core:
            core.abort(room, error, time.monotonic())

    def decline(self, room: int, peer: Address, error: ServingError) -> None:
        """Tell prefill that a room is not going to be reserved, so that its half need not wait for a deadline."""
        with self._driver as core:
            core.ways.decline(room, peer, error, time.monotonic())

    def connect(self, peer: Address) -> None:
        """Look up a prefill server and connect to all ranks of it that write to us, before a room needs it.
        ``connected`` tells what comes of it."""
        with self._driver as core:
            core.connect(peer, time.monotonic())

    def connected(self, peer: Address) -> Trial | None:
        """What has come of ``connect``, once; None until that is known."""
        self._driver.io.check()
        with self._driver.lock:
            return self._core.trials.pop(peer) if self._core.trials[peer].done else None

    def leave(self) -> None:
        """The weights are about to change: end all sessions. No room is open."""
        with self._driver as core:
            core.leave(time.monotonic())

    def join(self, model: ModelIdentity) -> None:
        """The weights are these now."""
        self.info = replace(self.info, model=model)
        with self._driver as core:
            core.join(self.info)

    @property
    def key(self) -> str:
        """See ``common.engine.peers``."""
        return self._pair_key.of(self.info)

    def forget(self, room: int) -> None:
        """Drop a room that is DONE or FAILED."""
        with self._driver.lock:
            self._core.forget(room)

    @property
    def counters(self) -> dict[str, float]:
        """Totals: ``kv_bytes_received``, ``kv_transfers_done``, ``kv_transfers_failed_<cause>``, …"""
        return self._driver.counters

    def close(self) -> None:
        """Say goodbye to the senders and stop. The pool's memory may go away afterwards."""
        if (effects := self._driver.stop()) is None:
            return
        self._lookups.shutdown(wait=False, cancel_futures=True)
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
        for link_id in list(self._sockets):
            self._close(link_id, linger=200)
        self._backend.close()
        self._context.term()

    # -- the I/O thread -------------------------------------------------------------------------------------------

    def _work(self, stalled: float) -> float | None:
        self._backend.progress()
        self._driver.tick(stalled)
        self._driver.carry_out()
        with self._driver.lock:
            if self._core.idle:
                return None
            interval = self._backend.progress_interval if self._core.ways.expecting else None
            return self._timing.tick if interval is None else interval

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Lookup):
            self._lookups.submit(self._look_up, effect.address)
        elif isinstance(effect, Connect):
            self._connect(effect)
        elif isinstance(effect, Warn):
            logger.warning(effect.text)
        elif isinstance(effect, Verify):
            self._verify(effect)
        else:
            assert isinstance(effect, Close)
            self._close(effect.link)

    def _verify(self, verify: Verify) -> None:
        half = verify.half
        found = self._checksum_of(half) % 2**64
        with self._driver.lock:
            self._core.verified(half, found == half.checksum, time.monotonic())

    def _checksum_of(self, half: RecvRoom) -> int:
        """Of what the senders were asked for: a last page's parts behind the prompt's end stay as they were."""
        reserve, parts, total = half.reserve, half.parts, 0
        first = reserve.first_page * parts
        count = -(-reserve.num_prompt_tokens * parts // self.info.layout.page_size) - first
        part_ids = parts_of(unpack_page_ids(reserve.page_ids), parts)[:count]
        for group, blocks in enumerate(half.blocks):
            offsets = np.arange(blocks // parts)
            places = places_of(group, blocks, first, len(part_ids), offsets, parts)
            total += self._checksum.of(self._extent, group, blocks, expand(part_ids, blocks, offsets, parts), places)
        return total

    def _look_up(self, address: Address) -> None:
        """In a pool thread: a bootstrap server that hangs must not hold up the pings."""
        try:
            ranks = fetch_ranks(address, self._timing.peer_timeout, self._secret)
        except OtherSecret:
            with self._driver as core:
                core.refused(address, OTHER_SECRET, time.monotonic())
        except NotRegistered as error:
            with self._driver as core:
                core.ways.not_registered(address, str(error), time.monotonic())
        except OSError as error:
            with self._driver as core:
                core.unreachable(address, str(error), time.monotonic())
        else:
            with self._driver as core:
                core.found(address, ranks, time.monotonic())

    def _connect(self, connect: Connect) -> None:
        link_id = connect.link.id
        sock = control_socket(self._context, zmq.DEALER)
        sock.setsockopt(zmq.ROUTING_ID, link_id)
        sock.setsockopt(zmq.IPV6, 1)
        # A session is one connection: a reconnect would hide messages that were lost.
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        # The kernel acknowledges for a stopped process, not for a dead host: this tells the two apart.
        sock.setsockopt(zmq.TCP_MAXRT, max(1, int(self._timing.peer_timeout * 1000)))
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED)
        self._sockets[link_id], self._monitors[link_id] = sock, monitor
        self._channels[link_id] = Channel(self._secret, link_id, TO_SENDER)
        self._driver.io.watch(sock, lambda: self._receive_all(link_id))
        self._driver.io.watch(monitor, lambda: self._on_monitor(link_id))
        sock.connect(connect.endpoint)

    def _send(self, send: Send) -> None:
        if (sock := self._sockets.get(send.link)) is not None:
            try:
                sock.send_multipart(self._channels[send.link].seal(encode(send.message)), zmq.NOBLOCK)
            except zmq.Again:
                pass  # no connection any more, of which the monitor tells

    def _receive_all(self, link_id: bytes) -> None:
        if (sock := self._sockets.get(link_id)) is not None:
            receive_all(sock, lambda frames: self._receive(link_id, frames))

    def _receive(self, link_id: bytes, frames: list[bytes]) -> None:
        if (channel := self._channels.get(link_id)) is None:
            return
        try:
            message = decode_to_receiver(channel.open(frames))
        except (AuthError, *UNREADABLE) as error:
            with self._driver.lock:
                self._core.unreadable(link_id, time.monotonic(), unsealed=isinstance(error, AuthError))
            return
        with self._driver.lock:
            self._core.receive(link_id, message, time.monotonic())

    def _on_monitor(self, link_id: bytes) -> None:
        if link_id not in self._sockets:
            return
        self._receive_all(link_id)  # what arrived before the end counts
        with self._driver.lock:
            self._core.disconnected(link_id, time.monotonic())
        self._close(link_id)

    def _close(self, link_id: bytes, linger: int = 0) -> None:
        sock = self._sockets.pop(link_id, None)
        if sock is None:
            return
        monitor = self._monitors.pop(link_id)
        del self._channels[link_id]
        self._driver.io.unwatch(monitor)
        self._driver.io.unwatch(sock)
        sock.disable_monitor()
        monitor.close(linger=0)
        sock.close(linger=linger)
