"""An engine that chooses the number of drafts: equal tokens, plain steps where drafts do not pay, measured costs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from baton.common.execution.draft_costs import measure_costs
from baton.common.speculative.base import Features
from baton.common.speculative.draft_length import CostTable, DraftLength
from baton.tests.common.speculative.test_device_drafts import VOCAB
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.rank_processes import run_ranks
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
def expected(checkpoint):
    return run(Engine(checkpoint))


@pytest.mark.parametrize("costs", [FREE, DEAR], ids=["free", "dear"])
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_tokens_are_equal_and_drafts_only_where_they_pay(checkpoint, expected, costs, on_device):
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


def test_a_request_with_a_gap_in_its_draft_s_pages_drafts_no_more_and_new_ones_do(checkpoint, expected):
    drafter = TableDrafter(expected, VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter, features=Features())
    lengths = adapted(engine, DEAR)
    lengths.num_drafts = 0
    old = engine.start("r0", [1, 2, 3], max_new_tokens=40)
    for _ in range(10):
        engine.scheduler.step(0.0)
    assert old.draft_gap and engine.drafting.num_drafted == 0
    adapted(engine, FREE)
    new = engine.start("r1", [2, 2, 3], max_new_tokens=40)
    outputs = engine.run()
    assert tokens_of(outputs) == {rid: expected[rid] for rid in ("r0", "r1")}
    assert engine.drafting.num_drafted > 0 and not new.draft_gap
    drafted = {item.rid: item.speculation.num_drafts for item in outputs if item.finish is not None}
    assert drafted["r0"] == 0 < drafted["r1"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_reads_tokens_alone_closes_the_gap_of_a_request_once_drafts_pay(checkpoint, expected, overlap):
    drafter = TableDrafter(expected, VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter, overlap=overlap)
    adapted(engine, DEAR).num_drafts = 0
    old = engine.start("r0", [1, 2, 3], max_new_tokens=40)
    for _ in range(10):
        engine.scheduler.step(0.0)
    assert old.draft_gap and engine.drafting.num_drafted == 0
    adapted(engine, FREE)
    assert tokens_of(engine.run()) == {"r0": expected["r0"]}
    assert engine.drafting.num_drafted > 0


def ask(engine, rid, prompt, count, **sampling):
    req = engine.start(rid, prompt, max_new_tokens=count, **sampling)
    return req, tokens_of(engine.run())[rid]


@pytest.mark.parametrize("features", [Features(), None], ids=["hidden-states", "tokens"])
def test_pages_of_plain_steps_are_reused_and_claim_no_draft(checkpoint, expected, features):
    drafter = TableDrafter(expected, VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter, features=features)
    plain = [1, 2, 3]
    whole = {"more": ask(Engine(checkpoint), "more", plain + expected["r0"], 30)[1]}
    adapted(engine, DEAR).num_drafts = 0
    ask(engine, "r0", plain, 40)
    adapted(engine, FREE)
    drafter.answers = whole
    more, found = ask(engine, "more", plain + expected["r0"], 30)  # what it drafts is checked by TableDrafter
    assert found == whole["more"] and more.num_cached_tokens >= 36
    assert (engine.drafting.num_drafted > 0) is (features is None)


def test_a_retracted_request_that_is_computed_anew_drafts_again(checkpoint, expected):
    drafter = TableDrafter(expected, VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter, features=Features(), radix=False)
    adapted(engine, DEAR).num_drafts = 0
    req = engine.start("r0", [1, 2, 3], max_new_tokens=40)
    for _ in range(10):
        engine.scheduler.step(0.0)
    assert req.draft_gap
    engine.scheduler.synchronize()
    engine.scheduler.batcher.pause("retract")
    engine.scheduler.batcher.paused = None
    adapted(engine, FREE)
    assert tokens_of(engine.run())["r0"] == expected["r0"]
    assert engine.drafting.num_drafted > 0


def test_ranks_choose_alike_by_the_first_one_s_costs(checkpoint, expected, tmp_path):
    ranks = run_ranks(Path(__file__).with_name("adaptive_rank.py"), 2, tmp_path, str(checkpoint))
    assert ranks[0] == ranks[1]
    tokens, num_steps, num_drafted = ranks[0]
    assert tokens == expected and num_drafted > num_steps > 0


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_costs_are_measured_and_leave_nothing_behind(checkpoint, expected, on_device):
    drafts = {"drafter": Unchecked(defaultdict(list), VOCAB, 4)} if on_device else {"proposer": RepeatLastTokens()}
    engine = Engine(checkpoint, **drafts)
    costs = measure_costs(engine.executor, engine.runner, engine.cache, 8, 3, on_device=on_device)
    assert costs.rows[0] == 1 and costs.rows[-1] == 8 * 4
    for part in (costs.plain, costs.verify):
        assert np.all(np.diff(part) >= 0) and part[0] > 0
    assert (costs.draft[-1] > 0) == on_device
    assert engine.cache.num_allocated == 0
    if not on_device:
        assert run(engine) == expected


def test_a_request_that_was_swapped_out_keeps_its_gap(checkpoint, expected):
    drafter = TableDrafter(expected, VOCAB, 4)
    engine = Engine(checkpoint, drafter=drafter, features=Features(), radix=False,
                    schedule={"retract_host_memory_gb": 0.01})
    adapted(engine, DEAR).num_drafts = 0
    req = engine.start("r0", [1, 2, 3], max_new_tokens=40)
    for _ in range(10):
        engine.scheduler.step(0.0)
    engine.scheduler.synchronize()
    engine.scheduler.batcher.retraction._retract(req)
    adapted(engine, FREE)
    assert tokens_of(engine.run())["r0"] == expected["r0"]
    assert engine.scheduler.batcher.swap.num_swapped_out == 1 and engine.drafting.num_drafted == 0
