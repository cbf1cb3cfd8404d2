"""Decode's side of KV transfers: one KVReceiver for each decode rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import zmq
import zmq.utils.monitor

from ...common.api.errors import ServingError
from ...common.api.identity import ModelIdentity
from ...common.api.unreadable import UNREADABLE
from ...common.config.server import DisaggregationArgs
from ...common.kvcache.layout import KVLayout
from ...common.kvcache.storage.page_servers import PageServers
from ..backends.base import Backend
from ..bootstrap import NotRegistered, SecretMismatch, fetch_ranks
from ..checksum import block_positions, make_checksum, resolve_extent
from ..driver import Driver
from ..endpoint import (
    FurtherGroup,
    PairKey,
    control_socket,
    pool_groups,
    rank_info,
    reachable_endpoint,
    receive_all,
    register_pool,
    with_weights,
)
from ..notices import Warn
from ..protocol.authentication import SECRET_MISMATCH, TO_SENDER, AuthError, Channel, make_secret
from ..protocol.messages import (
    DraftInfo,
    FurtherPool,
    PrefillResult,
    RankInfo,
    decode_to_receiver,
    encode,
    unpack_page_ids,
)
from ..protocol.reshard import expand_blocks, first_read_subpage, split_pages
from ..protocol.states import Phase
from ..protocol.timing import Timing
from .receiver_core import ReceiverCore
from .receiver_state import Address, Close, Connect, ConnectAttempt, Effect, Lookup, RecvTransfer, Send, Verify

logger = logging.getLogger("baton.kvtransfer")

Socket = zmq.Socket[bytes]


class KVReceiver:
    """Reserves pages for prompts with the prefill ranks that compute them, and waits for their content.

    The arguments are KVSender's; ``host`` is not used for listening, since a receiver only connects. All methods but
    the constructor and ``close`` return at once and may be called from any thread. Raises ConfigError when the backend
    refuses the memory.
    """

    def __init__(self, *, args: DisaggregationArgs, host: str, rank: int, tp_size: int, layout: KVLayout,
                 num_pages: int, regions: list[tuple[int, int, int]], backend: Backend, dp_rank: int = 0,
                 dp_size: int = 1, model: ModelIdentity | None = None, server: str = "",
                 spare_page: int | None = None, further: Sequence[FurtherGroup] = (), draft: DraftInfo | None = None,
                 deterministic: bool = False, page_servers: PageServers | None = None):
        pool = register_pool(backend, pool_groups(FurtherGroup(layout, num_pages, spare_page), further, draft), regions)
        self._checksum = make_checksum(pool.regions, pool.num_pages)
        self._extent = resolve_extent(args.kv_checksum, pool.regions)
        self._backend = backend
        self._flags = backend.completion_flags()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._secret = make_secret(args.cluster_secret)
        self._timing = Timing.of(args)
        self.info: RankInfo = rank_info(endpoint="", rank=rank, tp_size=tp_size, layout=layout, backend=backend,
                                        dp_rank=dp_rank, dp_size=dp_size, model=model, server=server,
                                        further=further, draft=draft, deterministic=deterministic)
        self._page_servers = page_servers or PageServers()
        self._pair_key = PairKey(args.cluster_secret, backend, regions)
        self._core = ReceiverCore(self.info, self._timing, num_pages, backend.local_metadata(), self._extent,
                                  backend.quarantine_seconds, spare_page,
                                  tuple(FurtherPool(group.num_pages, group.spare_page) for group in further))
        self._driver = Driver(f"kv-receiver-{rank}", self._core, self._timing, self._work, self._carry_out)
        self._sockets: dict[bytes, Socket] = {}
        self._monitors: dict[bytes, Socket] = {}
        self._channels: dict[bytes, Channel] = {}
        self._lookups = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kv-lookup")
        self._driver.io.start()

    # -- transfers ------------------------------------------------------------------------------------------------

    def reserve(self, room: int, peer: Address, prompt_digest: int, num_prompt_tokens: int, first_page: int,
                page_ids: np.ndarray, dp_rank: int | None = None,
                further: Sequence[tuple[int, np.ndarray]] = ()) -> None:
        """Reserves our pages ``page_ids [n]`` for the prompt's pages from ``first_page`` on (n may be 0), and
        ``further`` ones in the other cache groups: of each the first page and the pages from it on.

        ``peer`` is host and port of the prefill server's bootstrap server; its data-parallel rank ``dp_rank`` computes
        the prompt, by default the rank that is the room modulo their number. It is looked up and connected to in the
        background. Raises Conflict when the bootstrap room is in use.
        """
        self._driver.io.check()
        with self._driver as core:
            core.reserve(room, peer, prompt_digest, num_prompt_tokens, first_page, page_ids, time.monotonic(), dp_rank,
                         further)

    def phase(self, room: int) -> Phase:
        self._driver.io.check()
        transfer = self._core.transfers[room]
        if transfer.early_results and self._flags is not None:
            with self._driver.lock:
                self._core.check_flags(transfer, self._flags, time.monotonic())
        return transfer.phase

    def error(self, room: int) -> ServingError:
        """Returns why the transfer failed; valid in ABORTING (the pages are not free yet) and FAILED."""
        error = self._core.transfers[room].error
        assert error is not None, "the transfer has not failed"
        return error

    def result(self, room: int) -> PrefillResult:
        """Returns the first token with its log-probabilities; valid in DONE."""
        transfer = self._core.transfers[room]
        assert transfer.phase is Phase.DONE and transfer.result is not None, "the transfer is not done"
        return transfer.result

    def with_draft(self, room: int) -> bool:
        """Returns whether the draft's pages arrived with the model's; valid in DONE."""
        return self._core.transfers[room].with_draft

    def acknowledge(self, room: int) -> None:
        """Acknowledges the first token of a transfer that is DONE: it is on its way to the client, so that prefill may
        forget the prompt."""
        with self._driver as core:
            core.acknowledge(room)

    def abort(self, room: int, error: ServingError) -> None:
        """Fails a transfer and informs prefill. It is FAILED once no write can arrive any more. Does nothing where it
        has ended."""
        with self._driver as core:
            core.abort(room, error, time.monotonic())

    def decline(self, room: int, peer: Address, error: ServingError) -> None:
        """Tells prefill that nothing will be reserved for a room, so that it need not wait for a deadline."""
        with self._driver as core:
            core.connections.decline(room, peer, error, time.monotonic())

    def connect(self, peer: Address) -> None:
        """Looks up a prefill server and connects to all of its ranks that write to us, before a request needs it.
        ``connected`` returns the outcome."""
        with self._driver as core:
            core.connect(peer, time.monotonic())

    def connected(self, peer: Address) -> ConnectAttempt | None:
        """Returns the outcome of ``connect``, once; None until it is known."""
        self._driver.io.check()
        with self._driver.lock:
            return self._core.attempts.pop(peer) if self._core.attempts[peer].done else None

    def leave(self) -> None:
        """Ends all sessions before the weights change. Requires that no transfer is open."""
        with self._driver as core:
            core.leave(time.monotonic())

    def join(self, model: ModelIdentity, draft: ModelIdentity | None = None) -> None:
        """Introduces ourselves with the new weights from now on."""
        self.info = with_weights(self.info, model, draft)
        with self._driver as core:
            core.join(self.info)

    @property
    def key(self) -> str:
        """See ``common.engine.peers``."""
        return self._pair_key.of(self.info)

    def forget(self, room: int) -> None:
        """Drops a transfer that is DONE or FAILED."""
        with self._driver.lock:
            self._core.forget(room)

    @property
    def counters(self) -> dict[str, float]:
        """Totals ``kv_bytes_received``, ``kv_transfers_done``, ``kv_transfers_failed_<cause>``, …"""
        return self._driver.counters

    def close(self) -> None:
        """Ends all sessions and stops. The pool's memory may be freed afterwards."""
        if (effects := self._driver.stop()) is None:
            return
        self._lookups.shutdown(wait=False, cancel_futures=True)
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
        for session_id in list(self._sockets):
            self._close(session_id, linger=200)
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
            interval = self._backend.progress_interval if self._core.connections.has_writers else None
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
            self._close(effect.session)

    def _verify(self, verify: Verify) -> None:
        transfer = verify.transfer
        checksum = self._checksum_of(transfer) % 2**64
        with self._driver.lock:
            self._core.verified(transfer, checksum == transfer.checksum, time.monotonic())

    def _checksum_of(self, transfer: RecvTransfer) -> int:
        """Sums the sub-pages that the senders wrote; those of the last page after the prompt's end are not written, nor
        those that are not read after the prompt."""
        per_page, num_tokens, total = transfer.subpages, transfer.reserve.num_prompt_tokens, 0
        subpage_tokens = self.info.layout.page_size // per_page
        layer_groups = iter(enumerate(transfer.blocks))
        for layout, span in transfer.pages_of(self.info):
            first_missing = span.first_page * per_page
            first = max(first_missing, first_read_subpage(layout, num_tokens, subpage_tokens))
            subpages = split_pages(unpack_page_ids(span.page_ids), per_page)[
                first - first_missing:-(-num_tokens // subpage_tokens) - first_missing]
            for group, blocks in islice(layer_groups, len(layout.groups)):
                offsets = np.arange(blocks // per_page)
                positions = block_positions(group, blocks, first, len(subpages), offsets, per_page)
                block_ids = expand_blocks(subpages, blocks, offsets, per_page)
                total += self._checksum.compute(self._extent, group, blocks, block_ids, positions)
        return total

    def _look_up(self, address: Address) -> None:
        """Looks a server up, in a thread of the pool: a bootstrap server that hangs must not delay the pings."""
        try:
            ranks = fetch_ranks(address, self._timing.peer_timeout, self._secret)
        except SecretMismatch:
            with self._driver as core:
                core.refused(address, SECRET_MISMATCH, time.monotonic())
        except NotRegistered as error:
            with self._driver as core:
                core.connections.not_registered(address, str(error), time.monotonic())
        except OSError as error:
            with self._driver as core:
                core.unreachable(address, str(error), time.monotonic())
        else:
            self._page_servers.add(reachable_endpoint(address[0], info.page_server) for info in ranks)
            with self._driver as core:
                core.connect_to_ranks(address, ranks, time.monotonic())

    def _connect(self, connect: Connect) -> None:
        session_id = connect.session.id
        sock = control_socket(self._context, zmq.DEALER)
        sock.setsockopt(zmq.ROUTING_ID, session_id)
        sock.setsockopt(zmq.IPV6, 1)
        # A session is one connection: a reconnect would hide messages that were lost.
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        # The kernel acknowledges for a stopped process, but not for a dead host: this option notices the latter.
        sock.setsockopt(zmq.TCP_MAXRT, max(1, int(self._timing.peer_timeout * 1000)))
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED)
        self._sockets[session_id], self._monitors[session_id] = sock, monitor
        self._channels[session_id] = Channel(self._secret, session_id, TO_SENDER)
        self._driver.io.add_reader(sock, lambda: self._receive_all(session_id))
        self._driver.io.add_reader(monitor, lambda: self._on_monitor(session_id))
        sock.connect(connect.endpoint)

    def _send(self, send: Send) -> None:
        if (sock := self._sockets.get(send.session)) is not None:
            try:
                sock.send_multipart(self._channels[send.session].sign(encode(send.message)), zmq.NOBLOCK)
            except zmq.Again:
                pass  # there is no connection any more, which the monitor reports

    def _receive_all(self, session_id: bytes) -> None:
        if (sock := self._sockets.get(session_id)) is not None:
            receive_all(sock, lambda frames: self._receive(session_id, frames))

    def _receive(self, session_id: bytes, frames: list[bytes]) -> None:
        if (channel := self._channels.get(session_id)) is None:
            return
        try:
            message = decode_to_receiver(channel.verify(frames))
        except (AuthError, *UNREADABLE) as error:
            with self._driver.lock:
                self._core.unreadable(session_id, time.monotonic(), unauthenticated=isinstance(error, AuthError))
            return
        with self._driver.lock:
            self._core.receive(session_id, message, time.monotonic())

    def _on_monitor(self, session_id: bytes) -> None:
        if session_id not in self._sockets:
            return
        self._receive_all(session_id)  # messages that arrived before the end count
        with self._driver.lock:
            self._core.disconnected(session_id, time.monotonic())
        self._close(session_id)

    def _close(self, session_id: bytes, linger: int = 0) -> None:
        sock = self._sockets.pop(session_id, None)
        if sock is None:
            return
        monitor = self._monitors.pop(session_id)
        del self._channels[session_id]
        self._driver.io.remove_reader(monitor)
        self._driver.io.remove_reader(sock)
        sock.disable_monitor()
        monitor.close(linger=0)
        sock.close(linger=linger)
