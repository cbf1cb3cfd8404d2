"""Agreement of tensor-parallel ranks without collectives: other ranks report to rank 0 what has changed for them, and
rank 0 puts the minima that have changed into the next tick, which all ranks get anyway (engine/rank_channel.py).

Values are sampled when a rank begins to wait for its tick, so that a busy rank's last step delays none of them; a
report ends rank 0's wait. Keys are of an attention group: with several groups each agrees on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import zmq

from .agreement import Sample
from .parallel import Parallel


class Rows(msgspec.Struct, array_like=True):
    """Values of a ``topic`` by key in attention group ``group``: those of its rank ``rank`` in a report, an empty row
    for a key that it has no more; the minima of its ranks in a tick."""

    group: int
    rank: int
    topic: str
    rows: dict[int, list[int]]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Rows])
_Table = dict[int, list[int]]


class TickAgreement:
    """One rank's part. Implements RankAgreement; its Ticker calls ``report``, ``minima`` and ``apply``."""

    def __init__(self, parallel: Parallel, host: str = "127.0.0.1"):
        """A collective of all ranks; rank 0 listens on a free port of ``host``, without authentication."""
        world, tp = parallel.world, parallel.attn_tp
        self._group, self._rank, self._size = parallel.dp_rank, tp.rank, tp.size
        self.is_leader = world.rank == 0
        self._samples: dict[str, Sample] = {}
        self._reported: dict[str, Mapping[int, Sequence[int]]] = {}
        self._agreed: dict[str, _Table] = {}
        self._tables: dict[tuple[int, str], dict[int, _Table]] = {}  # at rank 0: by rank of a group
        self._minima: dict[tuple[int, str], _Table] = {}  # at rank 0: as they were sent
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.PULL if self.is_leader else zmq.PUSH)
        self.socket.setsockopt(zmq.IPV6, 1)
        if self.is_leader:
            self.socket.setsockopt(zmq.RCVHWM, 0)
            address = f"[{host}]" if ":" in host else host
            port = self.socket.bind_to_random_port(f"tcp://{address}")
            world.broadcast_bytes(f"tcp://{address}:{port}".encode())
        else:
            self.socket.setsockopt(zmq.SNDHWM, 0)
            self.socket.connect(world.broadcast_bytes(None).decode())

    def min_by_key(self, topic: str, keys: Sequence[int], sample: Sample, unknown: Sequence[int]) -> np.ndarray:
        """Implements RankAgreement, by the minima of the last tick."""
        self._samples[topic] = sample
        table = self._agreed.get(topic, {})
        kept = self._agreed[topic] = {key: table[key] for key in keys if key in table}
        return np.array([kept.get(key, unknown) for key in keys], np.int64).reshape(len(keys), len(unknown))

    def report(self) -> None:
        """Send rank 0 the values that have changed since the last call. Never blocks."""
        if changed := self._changes():
            self.socket.send(_encode(changed))

    def minima(self) -> list[Rows]:
        """The minima that have changed since the last call, of all groups; for rank 0."""
        reports = self._changes()
        while True:
            try:
                reports += _decoder.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        changed: dict[tuple[int, str], set[int]] = {}
        for report in reports:
            table = self._tables.setdefault((report.group, report.topic), {}).setdefault(report.rank, {})
            for key, row in report.rows.items():
                if row:
                    table[key] = row
                else:
                    table.pop(key, None)
            changed.setdefault((report.group, report.topic), set()).update(report.rows)
        found = (Rows(group, 0, topic, self._update(group, topic, keys)) for (group, topic), keys in changed.items())
        return [each for each in found if each.rows]

    def _update(self, group: int, topic: str, keys: set[int]) -> _Table:
        tables = [*self._tables[group, topic].values()]
        sent = self._minima.setdefault((group, topic), {})
        news: _Table = {}
        for key in keys:
            rows = [table[key] for table in tables if key in table]
            if not rows:
                sent.pop(key, None)
            elif len(rows) == self._size and (lowest := [*map(min, *rows)]) != sent.get(key):
                news[key] = sent[key] = lowest
        return news

    def apply(self, minima: Sequence[Rows]) -> None:
        """Take over the minima of a tick; each rank does before it acts on the tick."""
        for each in minima:
            if each.group == self._group:
                self._agreed.setdefault(each.topic, {}).update(each.rows)

    def _changes(self) -> list[Rows]:
        found = []
        for topic, sample in self._samples.items():
            rows, before = sample(), self._reported.get(topic, {})
            if rows != before:
                changed = {key: [int(value) for value in row] for key, row in rows.items() if before.get(key) != row}
                changed.update({key: [] for key in before if key not in rows})
                self._reported[topic] = dict(rows)
                found.append(Rows(self._group, self._rank, topic, changed))
        return found

    def close(self) -> None:
        self._context.destroy(linger=200)
