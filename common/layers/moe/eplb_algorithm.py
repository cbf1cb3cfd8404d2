"""Which experts should be on which rank: pure functions over the loads of one layer's experts.

The global policy of DeepSeek's EPLB (github.com/deepseek-ai/EPLB, arXiv:2412.19437, 3.4): the places beyond one an
expert go, one by one, to the expert whose replicas have the most to do; then the replicas, the busiest first, go to the
rank with the least to do. Here a rank never holds an expert twice, and what may stay where it is stays.
"""

from __future__ import annotations

import numpy as np


def replicas_of(load: np.ndarray, places: int, most: int) -> np.ndarray:
    """How often each expert is held, at least once and at most ``most`` times; ``places`` in all."""
    count = np.ones(len(load), np.int64)
    for _ in range(places - len(load)):
        # A load of nothing at all still spreads its replicas.
        share = np.where(count < most, (load + 1e-9) / count, -1.0)
        count[share.argmax()] += 1
    return count


def packed(load: np.ndarray, count: np.ndarray, ranks: int, places: int) -> list[list[int]]:
    """The experts of each rank, ``places`` different ones, with ``count[e]`` replicas of expert e that share its
    load."""
    each = load / count
    held: list[list[int]] = [[] for _ in range(ranks)]
    total = np.zeros(ranks)
    for expert in np.argsort(-each, kind="stable").tolist():
        for _ in range(int(count[expert])):
            free = [rank for rank in range(ranks) if len(held[rank]) < places]
            fit = [rank for rank in free if expert not in held[rank]]
            rank = min(fit, key=lambda rank: total[rank]) if fit else _made_room(held, expert, free[0], each, total)
            held[rank].append(expert)
            total[rank] += each[expert]
    return held


def _made_room(held: list[list[int]], expert: int, rank: int, each: np.ndarray, total: np.ndarray) -> int:
    """All ranks with a free place hold ``expert``: another rank hands one of its own to ``rank``, and has room.

    There is one: it holds more experts than ``rank``, and not this one.
    """
    giver = next(other for other in range(len(held)) if expert not in held[other])
    given = min((other for other in held[giver] if other not in held[rank]), key=lambda other: each[other])
    held[giver].remove(given)
    held[rank].append(given)
    total[giver] -= each[given]
    total[rank] += each[given]
    return giver


def settled(held: list[list[int]], before: np.ndarray) -> np.ndarray:
    """``[ranks, places]``: the sets of ``held`` given to the ranks that hold most of each already in ``before``, every
    expert that stays on its rank in its place."""
    overlap = np.array([[len(set(experts) & set(row)) for row in before.tolist()] for experts in held])
    after = np.empty_like(before)
    for _ in held:
        group, rank = np.unravel_index(overlap.argmax(), overlap.shape)
        overlap[group, :] = -1
        overlap[:, rank] = -1
        after[rank] = _in_place(held[group], before[rank].tolist())
    return after


def _in_place(experts: list[int], before: list[int]) -> list[int]:
    new = iter([expert for expert in experts if expert not in before])
    return [expert if expert in experts else next(new) for expert in before]


def balanced(load: np.ndarray, before: np.ndarray) -> np.ndarray:
    """A better ``[ranks, places]`` for experts of these loads than ``before``."""
    ranks, places = before.shape
    count = replicas_of(load, ranks * places, ranks)
    return settled(packed(load, count, ranks, places), before)


def first_placement(num_experts: int, ranks: int, places: int) -> np.ndarray:
    """``[ranks, places]`` without any knowledge: neighbours together, and what is redundant spread evenly."""
    own = np.arange(num_experts).reshape(ranks, -1)
    more = places - own.shape[1]
    # Each rank doubles experts of the next one: never its own.
    redundant = [[int(own[(rank + 1 + i // own.shape[1]) % ranks, i % own.shape[1]]) for i in range(more)]
                 for rank in range(ranks)]
    return np.concatenate([own, np.array(redundant, np.int64).reshape(ranks, more)], axis=1)


def unevenness(load: np.ndarray, placement: np.ndarray) -> float:
    """What the busiest rank has to do, by the mean of all ranks; 1 is even."""
    count = np.bincount(placement.ravel(), minlength=len(load))
    totals = (load / count)[placement].sum(1)
    return float(totals.max() / totals.mean()) if totals.any() else 1.0
