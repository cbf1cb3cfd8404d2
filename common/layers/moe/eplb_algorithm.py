"""Expert placement of EPLB: pure functions from the loads of one layer's experts to the experts of each rank.

The global policy of DeepSeek's EPLB (github.com/deepseek-ai/EPLB, arXiv:2412.19437, 3.4): the physical experts beyond
one for each logical expert go, one by one, to the expert whose replicas have the highest load; then the replicas, those
of the highest load first, go to the rank with the lowest load. Here a rank never has two replicas of an expert, and an
expert stays on its rank where it can. The hierarchical policy gives each node whole groups of experts first, those of
the highest load to the node with the lowest, and then does so within each node.

Loads are of one step or of several. Of several, a replica goes to the expert by which the highest loads of a replica,
added up over the steps, get the lowest; and each goes to the rank by which the squares of the ranks' loads, added up
over the steps, rise least: experts that are busy in the same steps go to different ranks.

A placement is the map ``physical_to_logical`` [ranks, experts of a rank].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def replica_counts(loads: np.ndarray, num_physical: int, max_replicas: int) -> np.ndarray:
    """Returns the number of replicas of each expert, 1 to ``max_replicas``, ``num_physical`` in all, by the loads
    [steps, experts]."""
    count = np.ones(loads.shape[1], np.int64)
    totals = loads.sum(0) + 1e-9  # A load of nothing at all still spreads its replicas.
    for _ in range(num_physical - len(count)):
        share = np.where(count < max_replicas, totals / count, -1.0)
        if len(loads) > 1:
            saved = np.where(count < max_replicas, _saved(loads, count), -1.0)
            share = np.where(saved >= saved.max() * (1 - 1e-9), share, -1.0)
        count[share.argmax()] += 1
    return count


def _saved(loads: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns by how much one more replica of each expert lowers the highest loads of a replica, added up over steps.
    """
    each = loads / count
    steps, busiest = np.arange(len(each)), each.argmax(1)
    highest = each[steps, busiest]
    each[steps, busiest] = loads[steps, busiest] / (count[busiest] + 1)
    return np.bincount(busiest, highest - each.max(1), minlength=len(count))


def pack_experts(loads: np.ndarray, count: np.ndarray, ranks: int, num_local: int) -> list[list[int]]:
    """Returns the experts of each rank, ``num_local`` different ones; ``count[e]`` replicas of expert e share its load,
    ``loads[:, e]`` by steps."""
    each = loads / count
    packed: list[list[int]] = [[] for _ in range(ranks)]
    total = np.zeros((ranks, len(loads)))
    for expert in np.argsort(-each.sum(0), kind="stable").tolist():
        for _ in range(int(count[expert])):
            free = [rank for rank in range(ranks) if len(packed[rank]) < num_local]
            fit = [rank for rank in free if expert not in packed[rank]]
            if fit:
                rise, loaded = (total @ each[:, expert]).tolist(), total.sum(1).tolist()
                rank = min(fit, key=lambda rank: (rise[rank], loaded[rank]))
            else:
                rank = _swap_in(packed, expert, free[0], each, total)
            packed[rank].append(expert)
            total[rank] += each[:, expert]
    return packed


def _swap_in(packed: list[list[int]], expert: int, rank: int, each: np.ndarray, total: np.ndarray) -> int:
    """Frees a slot for ``expert`` where all ranks with a free slot have it already: another rank hands one of its
    experts to ``rank``. Returns that other rank.

    There is one: it has more experts than ``rank``, and not this one.
    """
    giver = next(other for other in range(len(packed)) if expert not in packed[other])
    given = min((other for other in packed[giver] if other not in packed[rank]),
                key=lambda other: float(each[:, other].sum()))
    packed[giver].remove(given)
    packed[rank].append(given)
    total[giver] -= each[:, given]
    total[rank] += each[:, given]
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


def rebalance(loads: np.ndarray, before: np.ndarray, num_nodes: int = 1, num_groups: int = 1) -> np.ndarray:
    """Returns a better placement than ``before`` for experts of these loads [steps, experts], on ``num_nodes``
    nodes of neighbouring ranks: with several each gets as many of the ``num_groups`` groups of neighbouring experts."""
    if num_nodes == 1:
        return minimize_moves(_pack(loads, *before.shape), before)
    groups = np.arange(loads.shape[1]).reshape(num_groups, -1)
    nodes = before.reshape(num_nodes, -1, before.shape[1])
    packed = pack_experts(loads[:, groups].sum(2), np.ones(num_groups, np.int64), num_nodes, num_groups // num_nodes)
    sets = [groups[sorted(each)].ravel() for each in packed]
    after = np.empty_like(nodes)
    for index, node in _match([each.tolist() for each in sets], nodes.reshape(num_nodes, -1).tolist()):
        own = [sets[index][local].tolist() for local in _pack(loads[:, sets[index]], *nodes.shape[1:])]
        after[node] = minimize_moves(own, nodes[node])
    return after.reshape(before.shape)


def _pack(loads: np.ndarray, ranks: int, num_local: int) -> list[list[int]]:
    return pack_experts(loads, replica_counts(loads, ranks * num_local, ranks), ranks, num_local)


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
