"""Publishing what happens in a rank's prefix cache, so that routers know what each server holds.

Two sockets: a PUB socket with numbered batches, and on the port above it a ROUTER socket that answers
``[b"", first number wanted]`` with ``[b"", number, batch]`` for each batch from there on, and with an
end mark (number -1). Where the batches no longer reach back that far, one batch that clears everything
and stores the cache's whole content stands in for all of them, under the newest number. So whoever
missed something, or came late, asks and is up to date. Numbers begin at the clock's milliseconds: a
restarted server's are never mistaken for the next ones of its former life.

Who may connect can read the tokens of all prompts: the port belongs inside the cluster.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import zmq

from ..api.errors import ConfigError
from ..api.kv_events import END_OF_REPLAY, TOPIC, Cleared, Event, Removed, Stored, chained, encode
from ..config.server import ServerConfig
from ..kvcache.prefix_cache import PrefixCache

KEPT_BATCHES = 1000
HEARTBEAT_SECONDS = 2.0
"""An empty batch after this silence: a subscriber that lost the last batch learns it from the number."""
_QUEUED_BATCHES = 100_000


class PageRecorder:
    """The prefix cache's recorder: turns stored and removed pages into events.

    Pages of the cache are known by id, so a page's hash is found without walking the tree.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._hash_of: dict[int, int] = {}
        self.events: list[Event] = []

    def stored(self, parent: int | None, pages: np.ndarray, tokens: np.ndarray) -> None:
        """``pages`` (int64), computed from ``tokens`` (int32, whole pages), follow page ``parent`` (None: nothing)."""
        before = None if parent is None else self._hash_of[parent]
        hashes = chained(tokens.astype("<i4", copy=False).tobytes(), 4 * self._page_size, before)
        self._hash_of.update(zip(pages.tolist(), hashes))
        self.events.append(Stored(hashes, before, tokens.tolist(), self._page_size))

    def removed(self, pages: np.ndarray) -> None:
        hashes = [self._hash_of.pop(page) for page in pages.tolist()]
        self.events.append(Removed(hashes))

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return [Cleared()] if events and not self._hash_of else events

    def snapshot(self, cache: PrefixCache) -> list[Event]:
        """Events that make an empty copy equal to ``cache``, whatever is not taken yet."""
        events: list[Event] = [Cleared()]
        for parent, pages, tokens in cache.edges():
            before = None if parent is None else self._hash_of[parent]
            events.append(Stored([self._hash_of[page] for page in pages.tolist()], before, tokens.tolist(),
                                 self._page_size))
        return events


class KVEventPublisher:
    """Records a prefix cache's changes and publishes them, one batch a turn of the engine's loop."""

    def __init__(self, cache: PrefixCache, host: str, port: int):
        """Listens on ``port`` and the one above it; raises ConfigError where they cannot be had."""
        self._cache = cache
        self._recorder = cache.recorder = PageRecorder(cache.page_size)
        self._number = int(time.time() * 1000)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._next_heartbeat = 0.0
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.sndhwm = _QUEUED_BATCHES
        self._replays = self._context.socket(zmq.ROUTER)
        try:
            self._publisher.bind(f"tcp://{_address(host)}:{port}")
            self._replays.bind(f"tcp://{_address(host)}:{port + 1}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--kv-events-port needs ports {port} and {port + 1} of {host}: {error}.") from None

    def flush(self, now: float) -> None:
        """Publish what was recorded since the last call, and answer who asks for more; never blocks.

        ``now`` is a monotonic clock's seconds.
        """
        events = self._recorder.take()
        if events or now >= self._next_heartbeat:
            self._publish(events)
            self._next_heartbeat = now + HEARTBEAT_SECONDS
        while self._replays.poll(0):
            self._replay(self._replays.recv_multipart())

    def _publish(self, events: list[Event]) -> None:
        self._number += 1
        payload = encode(time.time(), events)
        self._kept.append((self._number, payload))
        self._publisher.send_multipart((TOPIC, self._number.to_bytes(8, "big"), payload))

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # not a question that has an answer
        peer, _, first = frames
        wanted = int.from_bytes(first, "big")
        oldest = self._kept[0][0] if self._kept else self._number + 1
        if oldest <= wanted <= self._number + 1:
            kept = [batch for batch in self._kept if batch[0] >= wanted]
        else:
            kept = [(self._number, encode(time.time(), self._recorder.snapshot(self._cache)))]
        try:
            for number, payload in kept:
                self._replays.send_multipart((peer, b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self._replays.send_multipart((peer, b"", END_OF_REPLAY, b""), zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # The peer left, or reads too slowly; it will ask again.

    def close(self) -> None:
        self._context.destroy(linger=0)


def start_publisher(config: ServerConfig, cache: PrefixCache | None) -> KVEventPublisher | None:
    """A publisher where the configuration wants one; raises ConfigError where it cannot be."""
    port = config.events.kv_events_port
    if not port:
        return None
    if cache is None:
        raise ConfigError("--kv-events-port tells of the prefix cache; drop --disable-radix-cache.")
    return KVEventPublisher(cache, config.http.host, port)


def _address(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "*"
    return f"[{host}]" if ":" in host else host
