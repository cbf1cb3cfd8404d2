"""Expert placement of EPLB: pure functions from the loads of one layer's experts to the experts of each rank.

The global policy of DeepSeek's EPLB (github.com/deepseek-ai/EPLB, arXiv:2412.19437, 3.4): the physical experts beyond
one for each logical expert go, one by one, to the expert whose replicas have the highest load; then the replicas, those
of the highest load first, go to the rank with the lowest load. Here a rank never has two replicas of an expert, and an
expert stays on its rank where it can. The hierarchical policy gives each node whole groups of experts first, those of
the highest load to the node with the lowest, and then does so within each node.

A placement is the map ``physical_to_logical`` [ranks, experts of a rank].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def replica_counts(load: np.ndarray, num_physical: int, max_replicas: int) -> np.ndarray:
    """Returns the number of replicas of each expert, 1 to ``max_replicas``, ``num_physical`` in all."""
    count = np.ones(len(load), np.int64)
    for _ in range(num_physical - len(load)):
        # A load of nothing at all still spreads its replicas.
        share = np.where(count < max_replicas, (load + 1e-9) / count, -1.0)
        count[share.argmax()] += 1
    return count


def pack_experts(load: np.ndarray, count: np.ndarray, ranks: int, num_local: int) -> list[list[int]]:
    """Returns the experts of each rank, ``num_local`` different ones; ``count[e]`` replicas of expert e share its load.
    """
    each = load / count
    packed: list[list[int]] = [[] for _ in range(ranks)]
    total = np.zeros(ranks)
    for expert in np.argsort(-each, kind="stable").tolist():
        for _ in range(int(count[expert])):
            free = [rank for rank in range(ranks) if len(packed[rank]) < num_local]
            fit = [rank for rank in free if expert not in packed[rank]]
            rank = min(fit, key=lambda rank: total[rank]) if fit else _swap_in(packed, expert, free[0], each, total)
            packed[rank].append(expert)
            total[rank] += each[expert]
    return packed


def _swap_in(packed: list[list[int]], expert: int, rank: int, each: np.ndarray, total: np.ndarray) -> int:
    """Frees a slot for ``expert`` where all ranks with a free slot have it already: another rank hands one of its
    experts to ``rank``. Returns that other rank.

    There is one: it has more experts than ``rank``, and not this one.
    """
    giver = next(other for other in range(len(packed)) if expert not in packed[other])
    given = min((other for other in packed[giver] if other not in packed[rank]), key=lambda other: each[other])
    packed[giver].remove(given)
    packed[rank].append(given)
    total[giver] -= each[given]
    total[rank] += each[given]
    return giver


def minimize_moves(packed: list[list[int]], before: np.ndarray) -> np.ndarray:
    """Assigns the sets of ``packed`` to the ranks that have most of each in ``before``; an expert that stays on its
    rank keeps its local index. Returns ``[ranks, experts of a rank]``."""
    after = np.empty_like(before)
    for group, rank in _match(packed, before.tolist()):
        after[rank] = _keep_indices(packed[group], before[rank].tolist())
    return after


def _match(sets: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Assigns ``sets`` of experts to as many ``places`` that have some: first where most are there."""
    overlap = np.array([[len(set(experts) & set(place)) for place in places] for experts in sets])
    for _ in sets:
        group, place = (int(index) for index in np.unravel_index(overlap.argmax(), overlap.shape))
        overlap[group, :] = -1
        overlap[:, place] = -1
        yield group, place


def _keep_indices(experts: list[int], before: list[int]) -> list[int]:
    new = iter([expert for expert in experts if expert not in before])
    return [expert if expert in experts else next(new) for expert in before]


def rebalance(load: np.ndarray, before: np.ndarray, num_nodes: int = 1, num_groups: int = 1) -> np.ndarray:
    """Returns a better placement than ``before`` for experts of these loads, on ``num_nodes`` nodes of neighbouring
    ranks: with several each gets as many of the ``num_groups`` groups of neighbouring experts."""
    if num_nodes == 1:
        return minimize_moves(_pack(load, *before.shape), before)
    groups = np.arange(len(load)).reshape(num_groups, -1)
    nodes = before.reshape(num_nodes, -1, before.shape[1])
    packed = pack_experts(load[groups].sum(1), np.ones(num_groups, np.int64), num_nodes, num_groups // num_nodes)
    sets = [groups[sorted(each)].ravel() for each in packed]
    after = np.empty_like(nodes)
    for index, node in _match([each.tolist() for each in sets], nodes.reshape(num_nodes, -1).tolist()):
        own = [sets[index][local].tolist() for local in _pack(load[sets[index]], *nodes.shape[1:])]
        after[node] = minimize_moves(own, nodes[node])
    return after.reshape(before.shape)


def _pack(load: np.ndarray, ranks: int, num_local: int) -> list[list[int]]:
    return pack_experts(load, replica_counts(load, ranks * num_local, ranks), ranks, num_local)


def initial_placement(num_experts: int, ranks: int, num_local: int) -> np.ndarray:
    """Returns a placement without any knowledge of loads: neighbours together, redundant replicas spread evenly."""
    own = np.arange(num_experts).reshape(ranks, -1)
    more = num_local - own.shape[1]
    # Each rank replicates experts of the next one: never its own.
    redundant = [[int(own[(rank + 1 + i // own.shape[1]) % ranks, i % own.shape[1]]) for i in range(more)]
                 for rank in range(ranks)]
    return np.concatenate([own, np.array(redundant, np.int64).reshape(ranks, more)], axis=1)


def imbalance(load: np.ndarray, placement: np.ndarray) -> float:
    """Returns the highest load of a rank over the mean of all ranks; 1 is even."""
    count = np.bincount(placement.ravel(), minlength=len(load))
    totals = (load / count)[placement].sum(1)
    return float(totals.max() / totals.mean()) if totals.any() else 1.0
