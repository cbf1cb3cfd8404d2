"""The prefill side of KV transfers: one KVSender for each prefill rank."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
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
from ..backends.base import Backend, WriteState
from ..checksum import make_checksum, places_of
from ..driver import Driver
from ..endpoint import PairKey, bind_control, control_socket, rank_info, receive_all, register_pool
from ..io_thread import BUSY_INTERVAL
from ..notices import Warn
from ..protocol.authentication import OTHER_SECRET, AuthError, Channels, secret_of
from ..protocol.messages import PrefillResult, RankInfo, Refused, decode_to_sender, encode
from ..protocol.reshard import BlockRange, expand
from ..protocol.states import Phase
from ..protocol.timing import Timing
from .sender_core import SenderCore
from .sender_state import Admit, Dismiss, Effect, Send, Session, Write

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("baton.kvtransfer")

LATENESS = 1 / 32  # of the time that a write takes: so much later its end is noticed


class KVSender:
    """Pushes the KV pages of prompts to the decode ranks that reserved room for them.

    ``host`` is the address that decode reaches us at; ``regions[g]`` is ``(address, bytes, device)`` of layer group g's
    memory, ``num_pages`` pages of ``layout.group_page_bytes(g)`` each, device -1 for the host. ``spare_page`` is one
    that no request uses: it opens the data path of a connection before a request needs it. All methods but the
    constructor and ``close`` return at once and may be called from any thread. Raises ConfigError when ``host`` cannot
    be bound or the backend refuses the memory.
    """

    def __init__(self, *, args: DisaggregationArgs, host: str, rank: int, tp_size: int, layout: KVLayout,
                 num_pages: int, regions: list[tuple[int, int, int]], backend: Backend, dp_rank: int = 0,
                 dp_size: int = 1, pp_rank: int = 0, pp_size: int = 1, model: ModelIdentity | None = None,
                 server: str = "", spare_page: int | None = None):
        self._checksum = make_checksum(register_pool(backend, layout, num_pages, regions), num_pages)
        self._backend = backend
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = control_socket(self._context, zmq.ROUTER)
        self.info: RankInfo = rank_info(endpoint=bind_control(self._router, host), rank=rank, tp_size=tp_size,
                                        layout=layout, backend=backend, dp_rank=dp_rank, dp_size=dp_size,
                                        pp_rank=pp_rank, pp_size=pp_size, model=model, server=server)
        self._pair_key = PairKey(args.cluster_secret, backend, regions)
        self._channels = Channels(secret_of(args.cluster_secret))
        self._timing = Timing.of(args)
        self._core = SenderCore(self.info, self._timing, _bytes_of(layout))
        self._driver = Driver(f"kv-sender-{rank}", self._core, self._timing, self._work, self._carry_out)
        self._in_flight: list[_Posting] = []
        self._spare_page = spare_page
        self._opening: list[_Opening] = []
        self._driver.io.watch(self._router, lambda: receive_all(self._router, self._receive))
        self._driver.io.start()

    # -- rooms ----------------------------------------------------------------------------------------------------

    def expect(self, room: int, prompt_digest: int, num_prompt_tokens: int) -> None:
        """Our half of a request has arrived; its room becomes RESERVING until decode's half comes, or a deadline.

        Raises Conflict when the room is in use.
        """
        self._driver.io.check()
        with self._driver as core:
            core.expect(room, prompt_digest, num_prompt_tokens, time.monotonic())

    def phase(self, room: int) -> Phase:
        self._driver.io.check()
        return self._core.rooms[room].phase

    def error(self, room: int) -> ServingError:
        """Why the room failed; valid in ABORTING and FAILED."""
        error = self._core.rooms[room].error
        assert error is not None, "the room has not failed"
        return error

    def first_page(self, room: int) -> int:
        """The first prompt page that decode lacks; valid from RESERVED on."""
        destinations = self._core.rooms[room].destinations
        assert destinations, "the destination is not known before RESERVED"
        return min(destination.first_page for destination in destinations)

    def push(self, room: int, group: int, first: int, src_page_ids: np.ndarray, ready: torch.cuda.Event | None) -> None:
        """Prompt pages ``first..first+n-1`` of a layer group are in our pages ``src_page_ids [n]``, once ``ready``.

        Pages that decode has are skipped. The source pages must keep their content until the room is terminal. May be
        called from RESERVED on; does nothing once the room has failed.
        """
        with self._driver as core:
            core.push(room, group, first, src_page_ids, ready)

    def finish(self, room: int, result: PrefillResult) -> None:
        """All pages were pushed: when they have arrived, send the result; the room is DONE with that."""
        with self._driver as core:
            core.finish(room, result, time.monotonic())

    def abort(self, room: int, error: ServingError) -> None:
        """Fail a room and tell decode. FAILED follows once none of its writes is in flight."""
        with self._driver as core:
            core.abort(room, error, time.monotonic())

    def forget(self, room: int) -> None:
        """Drop a room that is DONE or FAILED; its pages may be reused from then on."""
        with self._driver.lock:
            self._core.forget(room)

    def watch(self, room: int) -> None:
        """Drop a room that is DONE or FAILED, but go on listening for what becomes of the request: see ``taken``."""
        with self._driver.lock:
            self._core.watch(room)

    def taken(self, room: int) -> bool:
        """Whether decode has told that the first token of a watched room is on its way to the client."""
        return self._core.taken(room)

    def unwatch(self, room: int) -> None:
        with self._driver.lock:
            self._core.unwatch(room)

    def leave(self) -> None:
        """The weights are about to change: end all sessions and let nobody in. No room is open."""
        with self._driver as core:
            core.leave(time.monotonic())

    def join(self, model: ModelIdentity) -> None:
        """The weights are these now: peers find another instance, once its ``info`` is registered."""
        self.info = replace(self.info, instance=secrets.token_hex(8), model=model)
        with self._driver as core:
            core.join(self.info)

    @property
    def key(self) -> str:
        """See ``common.engine.peers``."""
        return self._pair_key.of(self.info)

    @property
    def counters(self) -> dict[str, float]:
        """Totals: ``kv_bytes_sent``, ``kv_transfers_done``, ``kv_transfers_failed_<error code>``, …"""
        return self._driver.counters

    @property
    def writes_waiting(self) -> tuple[int, int]:
        """Writes that wait for their forward pass or a lease, and those that are on their way."""
        return len(self._core.queue), len(self._in_flight)

    def close(self) -> None:
        """End all sessions, telling the peers, and stop."""
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
            message = decode_to_sender(self._channels.open(session_id, rest))
        except (AuthError, *UNREADABLE) as error:
            with self._driver.lock:
                self._core.counters["kv_messages_dropped"] += 1
                known = session_id in self._core.sessions.open
            if isinstance(error, AuthError) and not known:
                self._send(Send(session_id, Refused(OTHER_SECRET, unfit=True)))
            return
        with self._driver.lock:
            self._core.receive(session_id, message, time.monotonic())

    def _work(self, stalled: float) -> float | None:
        self._driver.tick(stalled)
        self._driver.carry_out()
        self._poll_openings()
        self._post_writes()
        self._poll_writes()
        self._announce()
        self._driver.carry_out()
        if self._in_flight:
            return min(BUSY_INTERVAL, (time.monotonic() - self._in_flight[0].posted) * LATENESS)
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
        # A ROUTER drops what it cannot deliver: that peer is gone, and its silence ends the session.
        self._router.send_multipart([send.session, *self._channels.seal(send.session, encode(send.message))])

    def _admit(self, admit: Admit) -> None:
        session: Session = admit.session
        try:
            peer = self._backend.add_peer(admit.metadata, session.lane.src_blocks, session.lane.dst_blocks)
            opening = _Opening(session, peer, time.monotonic() + self._timing.bootstrap_timeout)
            self._opening.append(opening)
            self._write_spare(opening)
        except ServingError as error:
            with self._driver.lock:
                self._core.sessions.rejected(session, error.message)

    def _write_spare(self, opening: _Opening) -> None:
        """Use each path that pages will take, which sets it up: over NIXL that takes longer than all else."""
        session, lane = opening.session, opening.session.lane
        if self._spare_page is None or session.spare_page is None:
            return
        src_id, dst_id = (np.array([page * parts]) for page, parts in (
            (self._spare_page, lane.src_parts), (session.spare_page, lane.dst_parts)))
        for piece in lane.pieces:
            src = expand(src_id, lane.src_blocks[piece.src_group], piece.src, lane.src_parts)
            dst = expand(dst_id, lane.dst_blocks[piece.dst_group], piece.dst, lane.dst_parts)
            opening.handles.append(self._backend.write(opening.peer, piece.src_group, src, piece.dst_group, dst))

    def _poll_openings(self) -> None:
        """Welcome whoever can be written to."""
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
            for piece in write.session.lane.pieces_of(write.group):
                self._post(posting, piece)
            self._in_flight.append(posting)

    def _post(self, posting: _Posting, piece: BlockRange) -> None:
        write, lane = posting.write, posting.write.session.lane
        src_blocks, dst_blocks = lane.src_blocks[piece.src_group], lane.dst_blocks[piece.dst_group]
        src = expand(write.src_ids, src_blocks, piece.src, lane.src_parts)
        try:
            posting.handles.append(self._backend.write(
                write.session.peer, piece.src_group, src, piece.dst_group,
                expand(write.dst_ids, dst_blocks, piece.dst, lane.dst_parts)))
        except ServingError:
            posting.failed = True
        if write.session.checksum != "off":  # the pages are read while they travel
            places = places_of(piece.dst_group, dst_blocks, write.first, len(write.dst_ids), piece.dst, lane.dst_parts)
            posting.checksum += self._checksum.of(write.session.checksum, write.group, src_blocks, src, places)

    def _poll_writes(self) -> None:
        pending = []
        for posting in self._in_flight:
            posting.poll(self._backend)
            if posting.handles:
                pending.append(posting)
            else:
                self._written(posting)
        self._in_flight = pending

    def _announce(self) -> None:
        """Tell receivers of rooms whose last writes are on their way where to look for their end."""
        if any(posting.failed for posting in self._in_flight):
            return
        for half in {id(posting.write.room): posting.write.room for posting in self._in_flight}.values():
            with self._driver.lock:
                destinations = self._core.landing(half)
            for destination in destinations:
                value = secrets.randbits(63)
                place = self._backend.ring(destination.session.peer, value)
                if place is not None and half.result is not None:
                    with self._driver.lock:
                        self._core.announce(destination, half.result, place, value)

    def _written(self, posting: _Posting) -> None:
        with self._driver.lock:
            self._core.written(posting.write, not posting.failed, time.monotonic(), posting.checksum)


@dataclass(kw_only=True)
class _Transfers:
    """What the backend has of one thing that is written: one transfer for each piece, all of which must end."""

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
class _Posting(_Transfers):
    """A write as the backend has it."""

    write: Write
    posted: float
    checksum: int = 0


@dataclass(eq=False)
class _Opening(_Transfers):
    """A session whose data path is being used for the first time."""

    session: Session
    peer: Any
    deadline: float


def _bytes_of(layout: KVLayout) -> Callable[[Write], int]:
    def count(write: Write) -> int:
        lane, page_bytes = write.session.lane, layout.group_page_bytes(write.group)
        blocks = sum(len(piece.src) for piece in lane.pieces_of(write.group))
        return len(write.src_ids) * page_bytes * blocks // lane.src_blocks[write.group]

    return count
