"""The host memory of a cluster's servers as a KV storage: one copy of a page, in the memory of the server that has it.

Nothing is written: a rank serves the pages of its own host memory (server.py), and reads those of its peers (peers.py).
Where the transfer backend reaches both sides' memory (staging.py), the owner writes pages into it; else they come as
messages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from ...common.api.errors import ConfigError
from ...common.config.server.tiers import KV_STORAGES
from ...common.kvcache.storage.base import (
    BackendStats,
    StorageBackend,
    StorageContext,
    aligned_buffer,
    backend_options,
)
from ..protocol.authentication import make_secret
from . import messages as m
from .peers import Peer, Peers, endpoint_of
from .server import PageServer
from .staging import BLOCK_BYTES, Staging

_MIN_OUT_BYTES, _MIN_LANE_BYTES, _NUM_LANES = 8 << 20, 16 << 20, 5
_MAX_LOCATIONS = 1 << 16


class PeersOptions(msgspec.Struct, kw_only=True):
    """``peers``: HOST:PORT of page servers, besides those that paired servers tell each other of. ``port`` that ours
    listens on, and its further ranks' on those after it; 0: any."""

    peers: list[str] = []
    port: int = 0

    @property
    def endpoints(self) -> list[str]:
        """Raises ConfigError."""
        try:
            return [endpoint_of(each) for each in self.peers]
        except ValueError as error:
            raise ConfigError(f"The option peers of --hicache-storage-backend peers takes HOST:PORT, not {error}."
                              ) from None


class PeersBackend:
    """See above. Raises ConfigError where it cannot listen."""

    def __init__(self, context: StorageContext, options: PeersOptions):
        assert context.slots is not None and context.objects is not None
        objects, cluster = context.objects, context.cluster
        shape, endpoints = objects.shape, options.endpoints
        largest = max(sum(objects.num_bytes(rectangle) for rectangle in source) for source in shape.sources)
        self.stats = BackendStats()
        self._staging = Staging(max(_MIN_OUT_BYTES, objects.num_bytes(shape.own)),
                                max(_MIN_LANE_BYTES, 2 * largest), _NUM_LANES)
        self._transfer = self._staging.register(cluster, context.host)
        metadata = b"" if self._transfer is None else self._transfer.local_metadata()
        secret = make_secret(cluster.secret)
        self._server = PageServer(context.host, options.port and options.port + shape.tp_rank, context.slots, objects,
                                  self._staging, self._transfer, secret, cluster.servers)
        introduction = m.Introduce(m.VERSION, self._server.instance, self._server.endpoint, metadata,
                                   self._staging.num_blocks, BLOCK_BYTES)
        holds = {objects.name(b"", rectangle) for source in shape.sources for rectangle in source}
        self._peers = Peers(cluster.servers, endpoints, introduction, holds, secret, context.stall_seconds / 2)
        self._lock = threading.Lock()
        self._locations: OrderedDict[str, Peer] = OrderedDict()  # of names that were found

    def __repr__(self) -> str:
        return f"PeersBackend({self._server}, {self._peers})"

    def buffer(self, num_bytes: int) -> np.ndarray:
        return aligned_buffer(num_bytes)

    def exists(self, names: Sequence[str]) -> list[bool]:
        asked: dict[Peer, list[int]] = {}
        for peer in self._peers.usable:
            if indices := [i for i, name in enumerate(names) if name.endswith(peer.holds)]:
                asked[peer] = indices
        found: dict[Peer, list[int]] = {}

        def handle(peer: Peer, answer: m.ToClient) -> bool:
            if isinstance(answer, m.Found) and len(answer.present) == len(asked[peer]):
                found[peer] = [index for index, there in zip(asked[peer], answer.present) if there]
            return True

        self._peers.ask({peer: m.Find(self._peers.next_number(), [names[index] for index in indices])
                         for peer, indices in asked.items()}, handle)
        location = {}
        for peer in sorted(found, key=lambda peer: len(found[peer])):  # of several, the one that has most
            location.update(dict.fromkeys(found[peer], peer))
        self._remember({names[index]: peer for index, peer in location.items()})
        return [index in location for index in range(len(names))]

    def get(self, names: Sequence[str], into: Sequence[np.ndarray]) -> list[bool]:
        self.exists([name for name in names if name not in self._locations])
        wanted: dict[Peer, list[int]] = {}
        for index, name in enumerate(names):
            peer = self._locations.get(name)
            if peer is not None and peer.is_up and into[index].nbytes == into[wanted.get(peer, [index])[0]].nbytes:
                wanted.setdefault(peer, []).append(index)
        arrived: set[int] = set()
        written = {peer: indices for peer, indices in wanted.items() if peer.writes}
        if written and (lane := self._staging.lease()) is not None:
            if not self._get_written(lane, written, names, into, arrived):
                written = {}
        else:
            written = {}
        self._get_messages({peer: indices for peer, indices in wanted.items() if peer not in written}, names, into,
                           arrived)
        self._forget([name for index, name in enumerate(names) if index not in arrived])
        return [index in arrived for index in range(len(names))]

    def put(self, names: Sequence[str], data: Sequence[np.ndarray]) -> list[bool]:
        """Does nothing: a page has one copy, in host memory."""
        return [True] * len(names)

    def delete(self, names: Sequence[str]) -> None:
        """Does nothing but to look them up again: they are their owners'."""
        self._forget(names)

    def clear(self) -> None:
        """Removes nothing: host memory is cleared by ``/flush_cache``."""
        with self._lock:
            self._locations.clear()

    def close(self) -> None:
        self._peers.close()
        self._server.close()
        if self._transfer is not None:
            self._transfer.close()

    # -- reads ------------------------------------------------------------------------------------------------------

    def _fetch(self, indices: list[int], names: Sequence[str], into: Sequence[np.ndarray],
               blocks: Sequence[int] = ()) -> m.Fetch:
        return m.Fetch(self._peers.next_number(), self._server.instance, [names[index] for index in indices],
                       into[indices[0]].nbytes, np.array(blocks, "<i4").tobytes())

    def _get_written(self, lane: int, wanted: dict[Peer, list[int]], names: Sequence[str], into: Sequence[np.ndarray],
                     arrived: set[int]) -> bool:
        """Lets peers write objects into a lane; returns False where that is too small for them."""
        order = [index for indices in wanted.values() for index in indices]
        placed = self._staging.place(lane, [into[index].nbytes for index in order])
        if placed is None:
            self._staging.release(lane)
            return False
        block_of = dict(zip(order, placed))

        def handle(peer: Peer, answer: m.ToClient) -> bool:
            if isinstance(answer, m.Unknown):
                self._peers.leave_out(peer, again=True)
            if isinstance(answer, m.Fetched) and len(answer.present) == len(wanted[peer]):
                for index, there in zip(wanted[peer], answer.present):
                    if there:
                        into[index][:] = self._staging.view(block_of[index], into[index].nbytes)
                        arrived.add(index)
            return isinstance(answer, m.Unknown | m.Fetched)

        failed = self._peers.ask({peer: self._fetch(indices, names, into, [block_of[index] for index in indices])
                                  for peer, indices in wanted.items()}, handle)
        (self._staging.retire if failed else self._staging.release)(lane)
        return True

    def _get_messages(self, wanted: dict[Peer, list[int]], names: Sequence[str], into: Sequence[np.ndarray],
                      arrived: set[int]) -> None:
        received = dict.fromkeys((index for indices in wanted.values() for index in indices), 0)

        def handle(peer: Peer, answer: m.ToClient) -> bool:
            indices = wanted[peer]
            if isinstance(answer, m.Part) and 0 <= answer.index < len(indices):
                index, data = indices[answer.index], answer.data
                if answer.offset == received[index] and answer.offset + len(data) <= into[index].nbytes:
                    into[index][answer.offset:answer.offset + len(data)] = np.frombuffer(data, np.uint8)
                    received[index] += len(data)
            elif isinstance(answer, m.Fetched) and len(answer.present) == len(indices):
                arrived.update(index for index, there in zip(indices, answer.present)
                               if there and received[index] == into[index].nbytes)
            return not isinstance(answer, m.Part)

        self._peers.ask({peer: self._fetch(indices, names, into) for peer, indices in wanted.items()}, handle)

    def _remember(self, locations: dict[str, Peer]) -> None:
        with self._lock:
            for name, peer in locations.items():
                self._locations.pop(name, None)
                self._locations[name] = peer
            while len(self._locations) > _MAX_LOCATIONS:
                self._locations.popitem(last=False)

    def _forget(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self._locations.pop(name, None)


@KV_STORAGES.register("peers", traits=("reads_only", "in_memory"))
def make(context: StorageContext) -> StorageBackend:
    return PeersBackend(context, backend_options(context, PeersOptions, "peers"))
