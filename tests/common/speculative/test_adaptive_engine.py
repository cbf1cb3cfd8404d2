"""An engine that chooses the number of drafts: equal tokens, plain steps where drafts do not pay, measured costs."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from baton.common.execution.draft_costs import measure_costs
from baton.common.speculative.draft_length import CostTable, DraftLength
from baton.tests.common.speculative.test_device_drafts import VOCAB, checkpoint  # noqa: F401  (a fixture)
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.table_drafter import TableDrafter
from baton.tests.helpers.toy_proposer import RepeatLastTokens

ROWS = (1, 64)
FREE = CostTable(ROWS, (1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
DEAR = CostTable(ROWS, (1.0, 1.0), (9.0, 9.0), (9.0, 9.0))


class Unchecked(TableDrafter):
    """Takes requests whose first tokens it was not shown."""

    def check(self, *args):
        pass


def run(engine, count=6, **sampling):
    for number in range(count):
        engine.start(f"r{number}", [1 + number, 2, 3], max_new_tokens=40, **sampling)
    return tokens_of(engine.run())


def adapted(engine, costs):
    lengths = DraftLength(costs, 4)
    engine.drafting.adapt(lengths)
    return lengths


@pytest.fixture(scope="module")
def expected(checkpoint):  # noqa: F811
    return run(Engine(checkpoint))


@pytest.mark.parametrize("costs", [FREE, DEAR], ids=["free", "dear"])
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_tokens_are_equal_and_drafts_only_where_they_pay(checkpoint, expected, costs, on_device):  # noqa: F811
    drafts = {"drafter": TableDrafter(expected, VOCAB, 4)} if on_device else {"proposer": RepeatLastTokens()}
    engine = Engine(checkpoint, overlap=True, **drafts)
    lengths = adapted(engine, costs)
    assert run(engine) == expected
    assert (engine.drafting.num_drafted > 0) or costs is DEAR
    assert lengths.acceptance._slots == {}
    if costs is DEAR:
        before = engine.drafting.num_drafted
        lengths.num_drafts = 0
        assert run(engine) == expected
        assert engine.drafting.num_drafted - before <= 6 * 4
        assert engine.scheduler.gauges["spec_num_draft_tokens"] == 1


def test_a_request_with_a_gap_in_its_draft_s_pages_drafts_no_more_and_new_ones_do(checkpoint, expected):  # noqa: F811
    drafter = TableDrafter(expected, VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter)
    lengths = adapted(engine, DEAR)
    lengths.num_drafts = 0
    old = engine.start("r0", [1, 2, 3], max_new_tokens=40)
    for _ in range(10):
        engine.scheduler.step(0.0)
    assert old.draft_gap and engine.drafting.num_drafted == 0
    adapted(engine, FREE)
    new = engine.start("r1", [2, 2, 3], max_new_tokens=40)
    found = tokens_of(engine.run())
    assert found == {rid: expected[rid] for rid in ("r0", "r1")}
    assert engine.drafting.num_drafted > 0 and not new.draft_gap
    assert sum(old.draft_counts.accepted) == 0 < sum(new.draft_counts.accepted)


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_costs_are_measured_and_leave_nothing_behind(checkpoint, expected, on_device):  # noqa: F811
    drafts = {"drafter": Unchecked(defaultdict(list), VOCAB, 4)} if on_device else {"proposer": RepeatLastTokens()}
    engine = Engine(checkpoint, **drafts)
    costs = measure_costs(engine.executor, engine.cache, 8, 3, on_device=on_device)
    assert costs.rows[0] == 1 and costs.rows[-1] == 8 * 4
    for part in (costs.plain, costs.verify):
        assert np.all(np.diff(part) >= 0) and part[0] > 0
    assert (costs.draft[-1] > 0) == on_device
    assert engine.cache.num_allocated == 0
    if not on_device:
        assert run(engine) == expected
