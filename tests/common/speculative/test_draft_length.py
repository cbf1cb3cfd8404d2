"""The controller of the number of drafts, simulated with the cost of a device and the acceptance of a draft model."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.speculative.draft_length import Acceptance, CostTable, DraftLength

GOLDEN = np.array([1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71])
SURVIVAL = np.diff(np.concatenate([[1.0], GOLDEN]))
K = len(SURVIVAL)
CONTEXT = 2048
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048)
BANDWIDTH, FLOPS = 0.7 * 4.8e12, 0.7 * 989e12


def h200(rows, layers=32, weights=15.0e9, launch=8e-6):
    """Seconds of a pass over bf16 weights on an H200 (Llama-3-8B's by default), at 70 % of the peaks."""
    return max(weights / BANDWIDTH, weights * rows / FLOPS) + layers * launch


TABLE = CostTable(ROWS, tuple(map(h200, ROWS)), tuple(map(h200, ROWS)),
                  tuple(h200(rows, layers=2, weights=0.8e9) for rows in ROWS), 131072 / BANDWIDTH)


def curve(values):
    return lambda rows: float(np.interp(rows, (*TABLE.rows, 10**6), (*values, values[-1] * 10**6 / TABLE.rows[-1])))


PLAIN, VERIFY, DRAFT = map(curve, (TABLE.plain, TABLE.verify, TABLE.draft))


def seconds(counts, table_context=CONTEXT):
    """Seconds of a step whose requests verify ``counts`` drafts, and draft as many."""
    num_reqs, attention = len(counts), len(counts) * table_context * TABLE.context_seconds
    if not counts.any():
        return PLAIN(num_reqs) + attention
    rows = num_reqs + int(counts.sum())
    passes = sum(DRAFT(int((counts >= depth).sum())) for depth in range(2, counts.max() + 1))
    return VERIFY(rows) + DRAFT(rows) + passes + attention


def fixed_speed(num_reqs, k, survival=SURVIVAL):
    return num_reqs * (1 + survival[:k].sum()) / seconds(np.full(num_reqs, k))


def simulate(num_reqs, survival, steps=400, warmup=150, table=TABLE):
    """Tokens a second; ``survival`` [K] or [num_reqs, K]."""
    rng = np.random.default_rng(num_reqs)
    lengths, keys = DraftLength(table, K), list(range(num_reqs))
    survival = np.broadcast_to(survival, (num_reqs, K))
    tokens = time = 0.0
    for step in range(steps):
        counts = lengths.choose(keys, np.full(num_reqs, K), num_reqs * CONTEXT)
        accepted = np.minimum((rng.random((num_reqs, 1)) < survival).sum(1), counts)
        if counts.any():
            lengths.acceptance.observe(keys, counts, accepted)
        if step >= warmup:
            tokens += num_reqs + accepted.sum()
            time += seconds(counts)
    return tokens / time, lengths


@pytest.mark.parametrize("num_reqs", [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256])
def test_the_choice_is_within_3_percent_of_the_best_fixed_number(num_reqs):
    speed, lengths = simulate(num_reqs, SURVIVAL, steps=3000 if num_reqs < 8 else 500)
    best = max(fixed_speed(num_reqs, k) for k in range(K + 1))
    assert speed > 0.97 * best
    assert speed >= fixed_speed(num_reqs, 0)


@pytest.mark.parametrize("num_reqs", [1, 64, 256])
def test_drafts_that_are_wrong_end_drafting(num_reqs):
    speed, lengths = simulate(num_reqs, np.zeros(K))
    assert lengths.num_drafts == 0
    assert speed == pytest.approx(fixed_speed(num_reqs, 0))


def test_a_device_on_which_each_row_costs_a_step_is_left_plain():
    each = tuple(rows * 1e-3 for rows in ROWS)
    _, lengths = simulate(8, SURVIVAL, table=CostTable(ROWS, each, each, each))
    assert lengths.num_drafts == 0


def test_requests_of_higher_acceptance_get_more_drafts():
    survival = np.concatenate([np.tile(0.95 ** np.arange(1, K + 1), (96, 1)),
                               np.tile(0.2 ** np.arange(1, K + 1), (96, 1))])
    speed, lengths = simulate(192, survival)
    counts = lengths.choose(range(192), np.full(192, K), 192 * CONTEXT)
    assert counts[:96].mean() > 3 * max(counts[96:].mean(), 0.5)
    assert speed > 1.1 * max(fixed_speed(192, k, survival.mean(0)) for k in range(K + 1))


def test_drafts_are_tried_again_after_a_while():
    lengths, keys, limits = DraftLength(TABLE, K), ["a"], np.full(1, K)
    for _ in range(200):
        counts = lengths.choose(keys, limits, CONTEXT)
        if counts.any():
            lengths.acceptance.observe(keys, counts, np.zeros(1, np.int64))
    assert lengths.num_drafts == 0
    plain = next(step for step in range(3000) if lengths.choose(keys, limits, CONTEXT).any())
    assert plain > 200


def test_a_choice_holds_while_the_batch_is_the_same_and_limits_hold_always():
    lengths, limits = DraftLength(TABLE, K), np.full(2, K)
    first = lengths.choose(["a", "b"], limits, 0)
    lengths.acceptance.observe(["a", "b"], first, np.array([0, 0]))
    assert lengths.choose(["a", "b"], limits, 0).tolist() == first.tolist()
    assert lengths.choose(["a", "b"], np.array([0, 2]), 0).tolist() == [0, 2]
    assert lengths.choose(["a", "c"], np.zeros(2, np.int64), 0).tolist() == [0, 0]
    assert lengths.choose(["a"], np.full(1, 100), 0).max() <= K


def test_small_gains_change_nothing():
    lengths = DraftLength(TABLE, 3)
    lengths.num_drafts = 2
    assert lengths._with_hysteresis(np.array([1.0, 1.2, 1.3, 1.305])) == 2
    assert lengths._with_hysteresis(np.array([1.0, 1.2, 1.3, 1.4])) == 3
    for _ in range(7):
        assert lengths._with_hysteresis(np.array([1.0, 0.8, 0.9, 0.99])) == 3
    assert lengths._with_hysteresis(np.array([1.0, 0.8, 0.9, 0.99])) == 0
    assert lengths._with_hysteresis(np.array([1.0, 0.8, 1.01, 0.99])) == 0
    assert lengths._with_hysteresis(np.array([1.0, 0.8, 1.03, 0.99])) == 2


def test_ranks_that_see_the_same_choose_the_same():
    assert simulate(48, SURVIVAL, 60, 5)[0] == simulate(48, SURVIVAL, 60, 5)[0]


def test_an_ended_request_leaves_nothing_to_the_next_one():
    acceptance = Acceptance(2)
    drafted = np.array([2, 2])
    for _ in range(20):
        acceptance.observe(["good", "bad"], drafted, np.array([2, 0]))
    good, bad = acceptance.estimate(["good", "bad"])
    assert good[0] > 0.7 > 0.4 > bad[0] and good[1] < good[0]
    acceptance.forget(["bad", "unknown"])
    assert acceptance.estimate(["new"])[0, 0] == pytest.approx(acceptance.of_batch()[0])
    assert len(acceptance._slots) == 2


def test_estimates_of_more_requests_than_there_were_slots():
    acceptance = Acceptance(3)
    keys = list(range(40))
    acceptance.observe(keys, np.full(40, 3), np.array([3] * 20 + [0] * 20))
    found = acceptance.estimate(keys)
    assert found.shape == (40, 3) and found[:20].min(0)[0] > found[20:].max(0)[0]


def test_a_position_that_was_never_tried_is_taken_as_good_as_the_one_before():
    acceptance = Acceptance(4)
    for _ in range(50):
        acceptance.observe(["a"], np.array([1]), np.array([1]))
    assert acceptance.of_batch() == pytest.approx(np.full(4, acceptance.of_batch()[0]))


@pytest.mark.parametrize("rows", [(1,), (1, 1), (4, 2)])
def test_a_cost_table_has_ascending_rows(rows):
    with pytest.raises(ValueError, match="at least two ascending"):
        CostTable(rows, (1.0,) * len(rows), (1.0,) * len(rows), (1.0,) * len(rows))
