"""Where experts go by their loads: properties of the placement, and of moves from one to the next."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.config.moe import MoESpec
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.tp import TPGroup
from baton.common.layers.moe.eplb_algorithm import imbalance, initial_placement, rebalance, replica_counts
from baton.common.layers.moe.experts import Experts
from baton.common.layers.moe.placement import Placement
from baton.common.layers.moe.weight_transfer import source_ranks
from baton.common.quantization import experts as experts_module
from baton.common.weights.slots import allocator


@st.composite
def layers(draw):
    """``(load, ranks, places)``: any loads, of some experts none; from no redundant place to all experts everywhere."""
    ranks = draw(st.integers(2, 6))
    experts = ranks * draw(st.integers(1, 5))
    places = draw(st.integers(experts // ranks, experts))
    load = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return np.array(load, float), ranks, places


def check(placement: np.ndarray, num_experts: int) -> None:
    assert sorted(set(placement.ravel().tolist())) == list(range(num_experts)), "every expert is somewhere"
    assert all(len(set(row)) == len(row) for row in placement.tolist()), "and on no rank twice"


@settings(max_examples=150, deadline=None)
@given(layers())
def test_every_placement_is_whole(layer):
    load, ranks, places = layer
    first = initial_placement(len(load), ranks, places)
    check(first, len(load))
    after = rebalance(load[None], first)
    check(after, len(load))
    assert np.array_equal(rebalance(load[None], after), after), "what is balanced stays"
    count = np.bincount(after.ravel(), minlength=len(load))
    assert np.array_equal(count, replica_counts(load[None], ranks * places, ranks))


@settings(max_examples=100, deadline=None)
@given(layers(), st.randoms(use_true_random=False))
def test_moves_arrive(layer, random):
    """Following the plan with whole experts as tokens of play: each place gets what it is to hold, from a holder."""
    load, ranks, places = layer
    before = rebalance(np.array([random.sample(load.tolist(), len(load))]), initial_placement(len(load), ranks, places))
    after = rebalance(load[None], before)
    sources = source_ranks(before, after)
    for rank in range(ranks):
        for place in range(places):
            source = sources[rank, place]
            assert (source == -1) == (before[rank, place] == after[rank, place])
            assert source == -1 or after[rank, place] in before[source]
            if after[rank, place] in before[rank]:
                assert source in (-1, rank), "what a rank has it does not fetch"


def test_replicas_go_to_the_busiest():
    assert replica_counts(np.array([[8.0, 1.0, 1.0, 2.0]]), 7, 4).tolist() == [4, 1, 1, 1]
    assert replica_counts(np.array([[8.0, 1.0, 2.0, 6.0]]), 7, 2).tolist() == [2, 1, 2, 2]
    assert sorted(replica_counts(np.zeros((1, 4)), 6, 4).tolist()) == [1, 1, 2, 2]


@pytest.mark.parametrize("redundant,bound", [(0, 1.5), (8, 1.15), (32, 1.08)])
def test_skewed_loads_become_even(redundant, bound):
    """Loads as Zipf's law has them, over 64 experts on 8 ranks, as they would be if neighbours stayed together: about
    3 times the mean."""
    for seed in range(5):
        load = np.random.default_rng(seed).permutation(1000 / np.arange(1, 65) ** 0.8)
        first = initial_placement(64, 8, (64 + redundant) // 8)
        assert imbalance(load, rebalance(load[None], first)) < min(bound, imbalance(load, first))


def test_one_hot_expert_alone_needs_replicas():
    load = np.array([100.0, 1, 1, 1, 1, 1, 1, 1])
    assert imbalance(load, rebalance(load[None], initial_placement(8, 4, 2))) > 3.5
    assert imbalance(load, rebalance(load[None], initial_placement(8, 4, 3))) < 1.1


def test_nodes_have_whole_groups_that_are_even():
    """Of 8 groups on 2 nodes of 2 ranks; replicas stay on their node."""
    load = np.random.default_rng(1).permutation(1000 / np.arange(1, 33) ** 0.8)
    before = initial_placement(32, 4, 10)
    after = rebalance(load[None], before, 2, 8)
    nodes = [set((after.reshape(2, -1)[node] // 4).tolist()) for node in range(2)]
    assert len(nodes[0]) == len(nodes[1]) == 4 and not nodes[0] & nodes[1]
    assert np.bincount(after.ravel(), minlength=32).min() == 1 and all(len(set(own)) == 10 for own in after.tolist())
    loads = [load.reshape(8, 4)[sorted(groups)].sum() for groups in nodes]
    assert max(loads) / min(loads) < 1.2 and imbalance(load, after) < min(1.2, imbalance(load, before))
    assert rebalance(load[None], after, 2, 8).tolist() == after.tolist(), "a second time nothing moves"


def balancedness(loads: np.ndarray, placement: np.ndarray) -> float:
    """The mean load of ranks over the highest, added up over steps: 1 is even."""
    each = loads / np.bincount(placement.ravel(), minlength=loads.shape[1])
    totals = each[:, placement].sum(2)
    return float(totals.mean(1).sum() / totals.max(1).sum())


def test_busiest_experts_of_single_steps_get_replicas():
    """Some experts have little to do but in a few steps, in which they have nearly everything: over all steps others
    have more."""
    steady, bursts = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        loads = rng.poisson(20, (64, 32)).astype(float)
        loads[:, :8] += 15
        bursting = rng.permutation(np.arange(8, 32))[:8]
        loads[np.arange(0, 64, 4), bursting[np.arange(16) % 8]] += 150
        before = initial_placement(32, 4, 10)
        for found, shown in ((steady, loads.sum(0, keepdims=True)), (bursts, loads)):
            after = rebalance(shown, before)
            check(after, 32)
            found.append(balancedness(loads, after))
        assert np.array_equal(rebalance(loads, after), after), "a second time nothing moves"
    assert all(vec > whole for vec, whole in zip(bursts, steady)) and np.mean(bursts) > np.mean(steady) + 0.03


def test_steps_that_are_alike_are_as_one():
    load = np.random.default_rng(0).permutation(1000 / np.arange(1, 65) ** 0.8)
    first = initial_placement(64, 8, 10)
    assert rebalance(np.stack([load, 2 * load, 0 * load]), first).tolist() == rebalance(load[None], first).tolist()


def test_bursts_within_nodes():
    loads = np.random.default_rng(3).poisson(5, (16, 32)) * np.random.default_rng(4).integers(0, 20, (16, 32))
    before = initial_placement(32, 4, 10)
    after = rebalance(loads, before, 2, 8)
    check(after, 32)
    nodes = [set((after.reshape(2, -1)[node] // 4).tolist()) for node in range(2)]
    assert len(nodes[0]) == len(nodes[1]) == 4 and not nodes[0] & nodes[1]
    assert balancedness(loads, after) > balancedness(loads, before)


def test_a_rank_s_own_replica_computes_its_tokens():
    ids, map_ = torch.tensor([[0, 3], [1, 2]]), np.array([[0, 1, 2], [2, 3, 0]])
    first, second = (Placement(map_, 4, torch.device("cpu"), rank) for rank in (0, 1))
    assert first.to_own(ids).tolist() == [[0, 4], [1, 2]] and second.to_own(ids).tolist() == [[5, 4], [1, 3]]
    second.update(np.array([[3, 1, 2], [2, 3, 0]]))
    assert second.to_own(ids).tolist() == [[5, 4], [1, 3]]


def test_replicas_take_turns_and_follow_moves():
    placement = Placement(np.array([[0, 1, 2], [2, 3, 0]]), 4, torch.device("cpu"))
    ids = torch.tensor([[0, 3], [0, 3], [1, 2], [1, 2]])
    assert placement.to_physical(ids).tolist() == [[0, 4], [5, 4], [1, 2], [1, 3]]
    assert placement.to_physical(ids, shift=1).tolist() == [[5, 4], [0, 4], [1, 3], [1, 2]]
    placement.update(np.array([[3, 1, 2], [2, 3, 0]]))
    assert placement.to_physical(ids).tolist() == [[5, 0], [5, 4], [1, 2], [1, 3]]


def test_kernels_are_warmed_up_for_all_sizes(monkeypatch):
    """By powers of two up to a largest that is none, and with more choices than places."""
    seen = []
    spec = MoESpec(num_experts=3, top_k=2, intermediate_size=8, layers=(0,))
    made = Experts("experts", spec, 16, ExpertParallel(TPGroup()), allocator(torch.float32, torch.device("cpu")))
    monkeypatch.setattr(experts_module, "moe_experts",
                        lambda x, *rest, **others: seen.append((len(x), int(rest[2].max()))))
    made.warm_up(13)
    assert seen == [(1, 1), (2, 2), (4, 2), (8, 2), (13, 2)]
