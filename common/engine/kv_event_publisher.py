"""Publishes the events of a rank's prefix cache, so that routers know which pages each server has.

Two sockets: a PUB socket with numbered batches, and on the port above it a ROUTER socket that answers
``[b"", first number]`` with ``[b"", number, batch]`` for each batch from there on, and with an
end mark (number -1). Where the replay buffer no longer reaches back that far, one batch that clears everything
and stores the cache's whole content replaces all of them, under the newest number. So a subscriber that
missed batches, or joined late, asks and is up to date. Numbers begin at the clock's milliseconds: those of a
restarted server are never mistaken for a continuation.

Any client that can connect can read the tokens of all prompts: the port belongs inside the cluster.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
import zmq

from ..api.errors import ConfigError
from ..api.kv_events import DISK, END_OF_REPLAY, TOPIC, Cleared, Event, Removed, Stored, chained, encode
from ..api.namespace import Namespace
from ..config.server import ServerConfig
from ..kvcache.prefix_cache import Node, PrefixCache
from ..kvcache.tiers.base import HostSlots, KVTier
from .tier_event_recorder import TierEventRecorder

if TYPE_CHECKING:
    from ..kvcache.storage.storage import Storage

REPLAY_BUFFER_BATCHES = 1000
HEARTBEAT_SECONDS = 2.0
"""An empty batch is sent after this silence: its number shows a subscriber that it lost the last batch."""
_SEND_QUEUE_BATCHES = 100_000
MAX_TIER_PAGES = 2**18
"""Pages outside the prefix cache whose hashes are remembered: 4 million tokens in pages of 16, 80 MB at worst."""


class PageRecorder:
    """Listener of the prefix cache: records stored and removed pages as events.

    Hashes are indexed by page id, so that a lookup does not walk the tree. Equal pages that differ in their lookahead
    have one hash, which is removed with the last of them.
    """

    def __init__(self, cache: PrefixCache, tiers: TierEventRecorder | None = None):
        """``tiers`` learns all pages, and its events follow those of the prefix cache."""
        self._cache = cache
        self._page_size = cache.page_size
        self._tiers = tiers
        self._hash_of: dict[int, int] = {}
        self._num_pages: Counter[int] = Counter()  # by hash
        self.events: list[Event] = []
        self._weights = ""

    def stored(self, node: Node, parent: int | None, pages: np.ndarray, tokens: np.ndarray) -> None:
        """``pages`` (int64), computed from ``tokens`` (int32, whole pages), follow page ``parent`` (None: nothing)."""
        namespace = node.namespace
        if namespace.weights != self._weights:
            return
        before = namespace.seed if parent is None else self._hash_of[parent]
        hashes = chained(tokens.astype("<i4", copy=False).tobytes(), 4 * self._page_size, before)
        self._hash_of.update(zip(pages.tolist(), hashes))
        self._num_pages.update(hashes)
        self.events.append(Stored(hashes, before, tokens.tolist(), self._page_size))
        if self._tiers is not None:
            self._tiers.learn(self._cache.page_keys(node), hashes, before, tokens.tolist())

    def removed(self, namespace: Namespace, pages: np.ndarray) -> None:
        if namespace.weights == self._weights:
            self._remove(pages)

    def weights_changed(self, weights: str) -> None:
        """Records that no page can be matched any more: those that requests read are of other ``weights``."""
        self._remove(np.array(list(self._hash_of), np.int64))
        self._weights = weights

    def _remove(self, pages: np.ndarray) -> None:
        hashes = [self._hash_of.pop(page) for page in pages.tolist()]
        self._num_pages.subtract(hashes)
        gone = [page_hash for page_hash in hashes if not self._num_pages[page_hash]]
        for page_hash in gone:
            del self._num_pages[page_hash]
        if gone:
            self.events.append(Removed(gone))

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        in_tiers = [] if self._tiers is None else self._tiers.take()
        if (events or in_tiers) and not self._hash_of and not self._tiers:
            return [Cleared(), *(event for event in in_tiers if isinstance(event, Removed) and event.medium == DISK)]
        return events + in_tiers

    def snapshot(self) -> list[Event]:
        """Events that make an empty copy equal to the cache and its tiers, including changes not taken yet."""
        events: list[Event] = [Cleared()]
        for namespace, parent, pages, tokens in self._cache.edges():
            if namespace.weights != self._weights:
                continue
            before = namespace.seed if parent is None else self._hash_of[parent]
            events.append(Stored([self._hash_of[page] for page in pages.tolist()], before, tokens.tolist(),
                                 self._page_size))
        return events if self._tiers is None else [*events, *self._tiers.snapshot()]


class KVEventPublisher:
    """Records a prefix cache's changes and publishes them, one batch per iteration of the engine's loop."""

    def __init__(self, cache: PrefixCache, host: str, port: int, tiers: TierEventRecorder | None = None,
                 storage: Callable[[], Storage | None] = lambda: None):
        """Listens on ``port`` and the one above it; raises ConfigError where one is not free. ``storage`` returns the
        one that is attached now."""
        self._tiers, self._storage = tiers, storage
        self._storage_contents: tuple[Storage, int] | None = None
        self._listener = PageRecorder(cache, tiers)
        cache.listeners.append(self._listener)
        self._number = int(time.time() * 1000)
        self._replay_buffer: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BUFFER_BATCHES)
        self._next_heartbeat = 0.0
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.sndhwm = _SEND_QUEUE_BATCHES
        self._replays = self._context.socket(zmq.ROUTER)
        try:
            self._publisher.bind(f"tcp://{_address(host)}:{port}")
            self._replays.bind(f"tcp://{_address(host)}:{port + 1}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--kv-events-port needs ports {port} and {port + 1} of {host}: {error}.") from None

    def flush(self, now: float) -> None:
        """Publish the events recorded since the last call, and answer replay requests; never blocks.

        ``now`` is a monotonic clock's seconds.
        """
        if self._tiers is not None:
            self._record_storage(self._tiers)
        events = self._listener.take()
        if events or now >= self._next_heartbeat:
            self._publish(events)
            self._next_heartbeat = now + HEARTBEAT_SECONDS
        while self._replays.poll(0):
            self._replay(self._replays.recv_multipart())

    def _record_storage(self, tiers: TierEventRecorder) -> None:
        storage = self._storage()
        contents = None if storage is None else (storage, storage.num_clears)
        if contents != self._storage_contents:  # another storage, or it was emptied
            self._storage_contents = contents
            tiers.storage_cleared()
        if storage is not None:
            tiers.written(storage.take_seen())

    def _publish(self, events: list[Event]) -> None:
        self._number += 1
        payload = encode(time.time(), events)
        self._replay_buffer.append((self._number, payload))
        self._publisher.send_multipart((TOPIC, self._number.to_bytes(8, "big"), payload))

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # not a valid request
        peer, _, number_bytes = frames
        first = int.from_bytes(number_bytes, "big")
        oldest = self._replay_buffer[0][0] if self._replay_buffer else self._number + 1
        if oldest <= first <= self._number + 1:
            batches = [batch for batch in self._replay_buffer if batch[0] >= first]
        else:
            batches = [(self._number, encode(time.time(), self._listener.snapshot()))]
        try:
            for number, payload in batches:
                self._replays.send_multipart((peer, b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self._replays.send_multipart((peer, b"", END_OF_REPLAY, b""), zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # The peer left, or reads too slowly; it will ask again.

    def close(self) -> None:
        self._context.destroy(linger=0)


def start_publisher(config: ServerConfig, cache: PrefixCache | None, tier: KVTier | None = None,
                    storage: Callable[[], Storage | None] = lambda: None) -> KVEventPublisher | None:
    """A publisher, None where the configuration has none; raises ConfigError where it cannot start. It tells of what
    ``tier`` keeps, too, where that has listeners, and of what the ``storage`` behind it has written."""
    port = config.events.kv_events_port
    if not port:
        return None
    if cache is None:
        raise ConfigError("--kv-events-port publishes the prefix cache; drop --disable-radix-cache.")
    if not hasattr(tier, "listeners"):
        return KVEventPublisher(cache, config.http.host, port)
    recorder = TierEventRecorder(cache.page_size, MAX_TIER_PAGES)
    cast(HostSlots, tier).listeners.append(recorder)
    return KVEventPublisher(cache, config.http.host, port, recorder, storage)


def _address(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "*"
    return f"[{host}]" if ":" in host else host
