"""Prefill's side of KV transfers: one KVSender for each prefill rank."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq
from msgspec.structs import replace

from ...common.api.errors import ServingError
from ...common.api.identity import ModelIdentity
from ...common.api.unreadable import UNREADABLE
from ...common.config.server import DisaggregationArgs
from ...common.kvcache.layout import KVLayout
from ...common.kvcache.storage.page_servers import PageServers
from ..backends.base import Backend, WriteState
from ..checksum import block_positions, make_checksum
from ..driver import Driver
from ..endpoint import (
    FurtherGroup,
    PairKey,
    bind_control,
    control_socket,
    pool_groups,
    rank_info,
    receive_all,
    register_pool,
    with_weights,
)
from ..io_thread import BUSY_INTERVAL
from ..notices import Warn
from ..protocol.authentication import SECRET_MISMATCH, AuthError, Channels, make_secret
from ..protocol.messages import DraftInfo, PrefillResult, RankInfo, Refused, decode_to_sender, encode
from ..protocol.reshard import BlockRange
from ..protocol.states import Phase
from ..protocol.timing import Timing
from .sender_core import SenderCore
from .sender_state import Admit, Dismiss, Effect, Send, Session, Write

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("baton.kvtransfer")

POLL_FRACTION = 1 / 32
"""A write in flight is polled again after this fraction of the time that it has taken so far, which bounds how late its
end is noticed."""


class KVSender:
    """Pushes the KV pages of prompts to the decode ranks that reserved pages for them.

    ``host`` is the address at which decode reaches us; ``regions[g]`` is ``(address, bytes, device)`` of layer group
    g's memory, ``num_pages`` pages of ``layout.group_page_bytes(g)`` each, device -1 for host memory. No request uses
    ``spare_page``: writing it opens the data path of a connection before a request needs it. With ``further`` cache
    groups, ``regions`` has their layer groups too, and layer groups are numbered one cache group after the other; those
    of the ``draft`` model's pool, whose pages have the ids of the first cache group's, come last. All methods but the
    constructor and ``close`` return at once and may be called from any thread. Raises ConfigError when ``host`` cannot
    be bound or the backend refuses the memory.
    """

    def __init__(self, *, args: DisaggregationArgs, host: str, rank: int, tp_size: int, layout: KVLayout,
                 num_pages: int, regions: list[tuple[int, int, int]], backend: Backend, dp_rank: int = 0,
                 dp_size: int = 1, pp_rank: int = 0, pp_size: int = 1, model: ModelIdentity | None = None,
                 server: str = "", spare_page: int | None = None, further: Sequence[FurtherGroup] = (),
                 draft: DraftInfo | None = None, deterministic: bool = False,
                 page_servers: PageServers | None = None):
        groups = pool_groups(FurtherGroup(layout, num_pages, spare_page), further, draft)
        pool = register_pool(backend, groups, regions)
        self._checksum = make_checksum(pool.regions, pool.num_pages)
        self._backend = backend
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = control_socket(self._context, zmq.ROUTER)
        self.info: RankInfo = rank_info(endpoint=bind_control(self._router, host), rank=rank, tp_size=tp_size,
                                        layout=layout, backend=backend, dp_rank=dp_rank, dp_size=dp_size,
                                        pp_rank=pp_rank, pp_size=pp_size, model=model, server=server,
                                        further=further, draft=draft, deterministic=deterministic,
                                        page_server="" if page_servers is None else page_servers.own)
        self._pair_key = PairKey(args.cluster_secret, backend, regions)
        self._channels = Channels(make_secret(args.cluster_secret))
        self._timing = Timing.of(args)
        self._core = SenderCore(self.info, self._timing, _bytes_of(pool.page_bytes))
        self._driver = Driver(f"kv-sender-{rank}", self._core, self._timing, self._work, self._carry_out)
        self._in_flight: list[_Posting] = []
        self._spare_pages = [group.spare_page for group in groups for _ in group.layout.groups]  # by layer group
        self._opening: list[_Opening] = []
        self._driver.io.add_reader(self._router, lambda: receive_all(self._router, self._receive))
        self._driver.io.start()

    # -- transfers ------------------------------------------------------------------------------------------------

    def expect(self, room: int, prompt_digest: int, num_prompt_tokens: int) -> None:
        """Opens the transfer of a request that has arrived. It is RESERVING until decode's destination comes, or a
        deadline. Raises Conflict when the bootstrap room is in use.
        """
        self._driver.io.check()
        with self._driver as core:
            core.expect(room, prompt_digest, num_prompt_tokens, time.monotonic())

    def phase(self, room: int) -> Phase:
        self._driver.io.check()
        return self._core.transfers[room].phase

    def error(self, room: int) -> ServingError:
        """Returns why the transfer failed; valid in ABORTING and FAILED."""
        error = self._core.transfers[room].error
        assert error is not None, "the transfer has not failed"
        return error

    def first_page(self, room: int) -> int:
        """Returns the first prompt page that decode lacks; valid from RESERVED on."""
        destinations = self._core.transfers[room].destinations
        assert destinations, "the destination is not known before RESERVED"
        return min(destination.first_page for destination in destinations)

    def push(self, room: int, group: int, first: int, src_page_ids: np.ndarray, ready: torch.cuda.Event | None) -> None:
        """Sends prompt pages ``first..first+n-1`` of a layer group from our pages ``src_page_ids [n]``, once ``ready``.

        Pages that decode has are skipped. The source pages must keep their content until the transfer is terminal. May
        be called from RESERVED on; does nothing once the transfer has failed.
        """
        with self._driver as core:
            core.push(room, group, first, src_page_ids, ready)

    def finish(self, room: int, result: PrefillResult) -> None:
        """Sends the result when all pages, which were pushed before, have arrived; the transfer is then DONE."""
        with self._driver as core:
            core.finish(room, result, time.monotonic())

    def abort(self, room: int, error: ServingError) -> None:
        """Fails a transfer and informs decode. FAILED follows once none of its writes is in flight."""
        with self._driver as core:
            core.abort(room, error, time.monotonic())

    def forget(self, room: int) -> None:
        """Drops a transfer that is DONE or FAILED; its pages may be reused from then on."""
        with self._driver.lock:
            self._core.forget(room)

    def await_ack(self, room: int) -> None:
        """Drops a transfer that is DONE or FAILED, but keeps listening for its first-token acknowledgement."""
        with self._driver.lock:
            self._core.await_ack(room)

    def is_acknowledged(self, room: int) -> bool:
        """True once decode has acknowledged, after ``await_ack``, that the first token is on its way to the client."""
        return self._core.is_acknowledged(room)

    def stop_awaiting_ack(self, room: int) -> None:
        with self._driver.lock:
            self._core.stop_awaiting_ack(room)

    def leave(self) -> None:
        """Ends all sessions and admits no receiver, before the weights change. Requires that no transfer is open."""
        with self._driver as core:
            core.leave(time.monotonic())

    def join(self, model: ModelIdentity, draft: ModelIdentity | None = None) -> None:
        """Admits receivers again, for the new weights: they find another instance once its ``info`` is registered."""
        self.info = replace(with_weights(self.info, model, draft), instance=secrets.token_hex(8))
        with self._driver as core:
            core.join(self.info)

    @property
    def key(self) -> str:
        """See ``common.engine.peers``."""
        return self._pair_key.of(self.info)

    @property
    def counters(self) -> dict[str, float]:
        """Totals ``kv_bytes_sent``, ``kv_transfers_done``, ``kv_transfers_failed_<error code>``, …"""
        return self._driver.counters

    @property
    def writes_waiting(self) -> tuple[int, int]:
        """Number of writes that wait for their forward pass or a lease, and of those in flight."""
        return len(self._core.queue), len(self._in_flight)

    def close(self) -> None:
        """Ends all sessions, informing the peers, and stops."""
        if (effects := self._driver.stop()) is None:
            return
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
        self._backend.close()
        self._router.close(linger=200)
        self._context.term()

    # -- the I/O thread -------------------------------------------------------------------------------------------

    def _receive(self, frames: list[bytes]) -> None:
        session_id, *rest = frames
        try:
            message = decode_to_sender(self._channels.verify(session_id, rest))
        except (AuthError, *UNREADABLE) as error:
            with self._driver.lock:
                self._core.counters["kv_messages_dropped"] += 1
                known = session_id in self._core.sessions.open
            if isinstance(error, AuthError) and not known:
                self._send(Send(session_id, Refused(SECRET_MISMATCH, unfit=True)))
            return
        with self._driver.lock:
            self._core.receive(session_id, message, time.monotonic())

    def _work(self, stalled: float) -> float | None:
        self._driver.tick(stalled)
        self._driver.carry_out()
        self._poll_openings()
        self._post_writes()
        self._poll_writes()
        self._send_early_results()
        self._driver.carry_out()
        if self._in_flight:
            return min(BUSY_INTERVAL, (time.monotonic() - self._in_flight[0].posted) * POLL_FRACTION)
        if self._core.queue or self._opening:
            return BUSY_INTERVAL
        return None if self._core.idle else self._timing.tick

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Admit):
            self._admit(effect)
        elif isinstance(effect, Warn):
            logger.warning(effect.text)
        else:
            self._dismiss(effect)

    def _send(self, send: Send) -> None:
        # A ROUTER socket drops what it cannot deliver: that peer is gone, and its silence ends the session.
        self._router.send_multipart([send.session, *self._channels.sign(send.session, encode(send.message))])

    def _admit(self, admit: Admit) -> None:
        session: Session = admit.session
        try:
            peer = self._backend.add_peer(admit.metadata, session.plan.src_blocks, session.plan.dst_blocks)
            opening = _Opening(session, peer, time.monotonic() + self._timing.bootstrap_timeout)
            self._opening.append(opening)
            self._write_spare(opening)
        except ServingError as error:
            with self._driver.lock:
                self._core.sessions.rejected(session, error.message)

    def _write_spare(self, opening: _Opening) -> None:
        """Writes once over each path that pages will take, which sets it up: over NIXL that takes longer than the
        rest."""
        session, plan = opening.session, opening.session.plan
        theirs = [pool.spare_page if pool.spare_page is not None and 0 <= pool.spare_page < pool.num_pages else None
                  for pool, layout in session.pools_with_layouts for _ in layout.groups]
        for blocks in plan.ranges:
            ours, its = self._spare_pages[blocks.src_group], theirs[blocks.dst_group]
            if ours is not None and its is not None:
                opening.handles.append(self._backend.write(
                    opening.peer, blocks.src_group, plan.src_block_ids(blocks, np.array([ours * plan.src_subpages])),
                    blocks.dst_group, plan.dst_block_ids(blocks, np.array([its * plan.dst_subpages]))))

    def _poll_openings(self) -> None:
        """Welcomes the receivers whose memory can be written to."""
        for opening in list(self._opening):
            opening.poll(self._backend)
            if opening.handles and time.monotonic() < opening.deadline:
                continue
            opening.failed |= bool(opening.handles)
            self._opening.remove(opening)
            with self._driver.lock:
                if opening.failed:
                    self._core.sessions.rejected(opening.session, "the decode server's memory cannot be written to")
                else:
                    self._core.sessions.admitted(opening.session, opening.peer, time.monotonic())
            if opening.failed:
                self._backend.remove_peer(opening.peer)

    def _dismiss(self, dismiss: Dismiss) -> None:
        session = dismiss.session
        if session.peer is None:
            return
        self._backend.remove_peer(session.peer)
        self._poll_writes()

    def _post_writes(self) -> None:
        with self._driver.lock:
            writes = self._core.queue.take(time.monotonic(), lambda event: event.query())
        for write in writes:
            posting = _Posting(write, time.monotonic())
            for blocks in write.session.plan.ranges_of(write.group):
                self._post(posting, blocks)
            self._in_flight.append(posting)

    def _post(self, posting: _Posting, blocks: BlockRange) -> None:
        write, plan = posting.write, posting.write.session.plan
        src_ids = plan.src_block_ids(blocks, write.src_ids)
        try:
            posting.handles.append(self._backend.write(
                write.session.peer, blocks.src_group, src_ids, blocks.dst_group,
                plan.dst_block_ids(blocks, write.dst_ids)))
        except ServingError:
            posting.failed = True
        if write.session.checksum != "off":  # the pages are read while they travel
            positions = block_positions(blocks.dst_group, plan.dst_blocks[blocks.dst_group], write.first,
                                        len(write.dst_ids), blocks.dst, plan.dst_subpages)
            posting.checksum += self._checksum.compute(write.session.checksum, write.group,
                                                       plan.src_blocks[blocks.src_group], src_ids, positions)

    def _poll_writes(self) -> None:
        pending = []
        for posting in self._in_flight:
            posting.poll(self._backend)
            if posting.handles:
                pending.append(posting)
            else:
                self._written(posting)
        self._in_flight = pending

    def _send_early_results(self) -> None:
        """Sends results whose pages are still in flight, with the completion flag that is written after the pages."""
        if any(posting.failed for posting in self._in_flight):
            return
        for transfer in {id(posting.write.transfer): posting.write.transfer for posting in self._in_flight}.values():
            with self._driver.lock:
                destinations = self._core.early_completion_targets(transfer)
            for destination in destinations:
                value = secrets.randbits(63)
                flag = self._backend.write_flag(destination.session.peer, value)
                if flag is not None and transfer.result is not None:
                    with self._driver.lock:
                        self._core.send_early_result(destination, transfer.result, flag, value)

    def _written(self, posting: _Posting) -> None:
        with self._driver.lock:
            self._core.written(posting.write, not posting.failed, time.monotonic(), posting.checksum)


@dataclass(kw_only=True)
class _Handles:
    """The backend's handles of one write, one for each block range. All of them must end."""

    handles: list[Any] = field(default_factory=list)
    failed: bool = False

    def poll(self, backend: Backend) -> None:
        pending = []
        for handle in self.handles:
            state = backend.poll(handle)
            if state is WriteState.PENDING:
                pending.append(handle)
            elif state is WriteState.FAILED:
                self.failed = True
        self.handles = pending


@dataclass
class _Posting(_Handles):
    """A write that was posted to the backend."""

    write: Write
    posted: float
    checksum: int = 0


@dataclass(eq=False)
class _Opening(_Handles):
    """A session whose data path is being used for the first time."""

    session: Session
    peer: Any
    deadline: float


def _bytes_of(page_bytes: Sequence[int]) -> Callable[[Write], int]:
    """``page_bytes`` are those of a page of each layer group."""
    def count(write: Write) -> int:
        plan = write.session.plan
        blocks = sum(len(blocks.src) for blocks in plan.ranges_of(write.group))
        return len(write.src_ids) * page_bytes[write.group] * blocks // plan.src_blocks[write.group]

    return count
