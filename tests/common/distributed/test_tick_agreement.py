"""Minima over ranks by reports and ticks: what every rank has reported, on all ranks at the same tick."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from baton.common.distributed.tick_agreement import TickAgreement


class World:
    """Ranks of one process; rank 0 is made first."""

    def __init__(self, rank: int, said: list[bytes]):
        self.rank, self._said = rank, said

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        if data is not None:
            self._said.append(data)
        return self._said[0]


@pytest.fixture
def make_ranks():
    made = []

    def make(groups: int, size: int) -> list[TickAgreement]:
        said: list[bytes] = []
        for rank in range(groups * size):
            made.append(TickAgreement(SimpleNamespace(
                world=World(rank, said), dp_rank=rank // size, attn_tp=SimpleNamespace(rank=rank % size, size=size))))
        return made

    yield make
    for each in made:
        each.close()


def tick(ranks: list[TickAgreement], reporting: list[int] | None = None) -> list:
    """One tick; only the ``reporting`` ranks but the first have got as far as to wait for it."""
    sent = 0
    for index, rank in enumerate(ranks[1:], 1):
        if reporting is None or index in reporting:
            rank.report()
            sent += 1
    if sent:
        ranks[0].socket.poll(5)
        time.sleep(0.02)
    minima = ranks[0].minima()
    for rank in ranks:
        rank.apply(minima)
    return minima


def ask(ranks, values, keys, topic="x", unknown=(-1, -1)):
    """``values``: by rank, rows by key."""
    return [rank.min_by_key(topic, keys, values[index].copy, unknown).tolist() for index, rank in enumerate(ranks)]


def test_all_ranks_learn_the_minimum_once_each_has_reported(make_ranks):
    ranks = make_ranks(1, 3)
    values = [{7: (3, 1)}, {7: (2, 5)}, {7: (4, 4)}]
    assert ask(ranks, values, [7]) == 3 * [[[-1, -1]]]
    tick(ranks, reporting=[1])
    assert ask(ranks, values, [7]) == 3 * [[[-1, -1]]]
    tick(ranks)
    assert ask(ranks, values, [7]) == 3 * [[[2, 1]]]
    assert tick(ranks) == []
    values[2][7] = (1, 9)
    tick(ranks)
    assert ask(ranks, values, [7]) == 3 * [[[1, 1]]]


def test_keys_come_and_go(make_ranks):
    ranks = make_ranks(1, 2)
    values = [{1: (5, 5), 2: (6, 6)}, {1: (4, 4), 2: (7, 7)}]
    ask(ranks, values, [1, 2])
    tick(ranks)
    assert ask(ranks, values, [2, 1]) == 2 * [[[6, 6], [4, 4]]]
    for rows in values:
        del rows[1]
        rows[3] = (0, 0)
    values[1][3] = (1, 1)
    tick(ranks, reporting=[])  # the second rank has not got there
    assert ask(ranks, values, [2, 3]) == 2 * [[[6, 6], [-1, -1]]]
    tick(ranks)
    assert ask(ranks, values, [2, 3]) == 2 * [[[6, 6], [0, 0]]]
    assert all(set(table) == {2, 3} for rank in ranks for table in rank._agreed.values())
    assert all(set(table) == {2, 3} for table in ranks[0]._minima.values())


def test_groups_agree_on_their_own(make_ranks):
    ranks = make_ranks(2, 2)
    values = [{1: (5, 5)}, {1: (4, 6)}, {1: (9, 9)}, {1: (8, 10)}]
    ask(ranks, values, [1])
    tick(ranks)
    assert ask(ranks, values, [1]) == [[[4, 5]], [[4, 5]], [[8, 9]], [[8, 9]]]


def test_a_report_ends_the_wait_of_the_first_rank(make_ranks):
    ranks = make_ranks(1, 2)
    ask(ranks, [{1: (1, 1)}, {1: (1, 1)}], [1])
    assert not ranks[0].socket.poll(0)
    ranks[1].report()
    assert ranks[0].socket.poll(1000)


def test_random_values_and_delays(make_ranks):
    """Whoever reports late, all ranks read the same, and in the end the minimum."""
    rng = np.random.default_rng(0)
    ranks = make_ranks(1, 3)
    values = [{} for _ in ranks]
    for step in range(60):
        if step % 3 == 0:
            for rows in values:
                rows[step] = (0, 0)
                rows.pop(step - 30, None)
        for rows in values:
            key = int(rng.choice(list(rows)))
            rows[key] = tuple(rng.integers(0, 9, 2).tolist())
        answers = ask(ranks, values, list(values[0]))
        assert answers[0] == answers[1] == answers[2]
        tick(ranks, reporting=[index for index in (1, 2) if rng.random() < 0.6])
    tick(ranks)
    expected = [[min(rows[key][i] for rows in values) for i in (0, 1)] for key in values[0]]
    assert ask(ranks, values, list(values[0])) == 3 * [expected]
