"""Counts of drafts: of a request, and of an engine."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.api.merged_states import merge_states
from baton.common.api.messages import OutputBatch, State, decode_from_engine, encode
from baton.common.obs.metrics import ServerMetrics
from baton.common.scheduler.draft_stats import DraftStats
from baton.common.serving.context.draft_counts import DraftCounts


def test_a_request_counts_all_decode_steps_with_drafts_or_without():
    counts, output = DraftCounts(), 1  # the prompt's token
    for num_drafts, num_accepted in ((3, 2), (0, 0), (3, 0), (0, 0), (0, 0), (2, 2)):
        if num_drafts:
            counts.add(num_drafts, num_accepted + 1)
        output += 1 + num_accepted
    report = counts.report(output)
    assert (report.num_steps, report.num_drafts, report.num_accepted) == (6, 8, 4)
    assert report.histogram == [1, 0, 2] and not report.simulated
    assert report.accept_length == output / 6
    output += 3  # plain steps
    assert counts.report(output).num_steps == 9


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_a_run_that_was_cut_by_the_request_s_end_is_one_step(cut):
    counts = DraftCounts(simulated=True)
    counts.add(3, 2)
    counts.add(3, 4 - cut)
    report = counts.report(11 - cut)  # with the prompt's token and four plain ones
    assert report.num_steps == 6 and report.num_accepted == 4 - cut and report.simulated


def test_a_request_without_drafts_has_its_plain_steps():
    assert DraftCounts().report(5).num_steps == 4
    assert DraftCounts().report(0).num_steps == 0 == DraftCounts().report(0).accept_length


def test_the_rows_of_a_message_have_their_drafts():
    batch = OutputBatch([], [])
    batch.extend(["a", "b"], [1, 2])
    batch.extend(["c"], [3, 4], [2], [3])
    batch.append("d", [5], None)
    batch.extend(["e"], [6])
    batch.append("f", [7], None, 2)
    rows = [(row.rid, row.token_ids, row.num_drafts) for row in decode_from_engine(encode(batch)).rows()]
    assert rows == [("a", [1], 0), ("b", [2], 0), ("c", [3, 4], 3), ("d", [5], 0), ("e", [6], 0), ("f", [7], 2)]
    single = OutputBatch([], [])
    single.append("a", [1], None, 4)
    assert [row.num_drafts for row in single.rows()] == [4] and single.counts is None


def test_an_engine_counts_drafts_by_position():
    stats = DraftStats(3, 3)
    assert stats.gauges["spec_accept_length"] == stats.gauges["spec_accept_rate"] == 0
    stats.add(np.array([3, 3, 0, 2]), np.array([3, 1, 0, 0]))
    assert (stats.num_steps, stats.num_verified, stats.num_drafted, stats.num_accepted) == (1, 3, 8, 4)
    assert stats.counters == {
        "spec_verified_drafts": 3, "spec_draft_tokens": 8, "spec_accepted_tokens": 4, "spec_accepted_tokens_at_1": 2,
        "spec_accepted_tokens_at_2": 1, "spec_accepted_tokens_at_3": 1}
    assert stats.gauges == pytest.approx({"spec_accept_length": 1 + 4 / 3, "spec_accept_rate": 0.5,
                                          "spec_num_steps": 3, "spec_num_draft_tokens": 4})
    for _ in range(1000):
        stats.add(np.array([3]), np.array([0]))
    assert stats.gauges["spec_accept_length"] == pytest.approx(1, abs=0.01)


def state(**gauges):
    stats = DraftStats(2, 2)
    stats.add(np.array([2]), np.array([1]))
    return State(seq=0, total_pages=4, free_pages=2, held_pages=1, cached_pages=1, page_size=16, num_running=2,
                 num_waiting=3, num_transferring=0, counters=stats.counters, gauges={**stats.gauges, **gauges})


def exported(metrics, state):
    lines = metrics.render(state).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if "spec_" in line and line[0] != "#" and "_created" not in line)


def test_metrics_have_sglang_s_names_too():
    metrics = ServerMetrics("m", "null", speculates=True)
    metrics.spec_verify_calls.inc(7)
    found, labels = exported(metrics, state()), '{mode="null",model_name="m"}'
    for name, value in {"spec_accept_length": 2, "spec_accept_rate": 0.5, "spec_num_steps": 2,
                        "spec_num_draft_tokens": 3, "spec_verify_calls_total": 7}.items():
        assert float(found[f"sglang:{name}{labels}"]) == float(found[f"baton:{name}{labels}"]) == value
    assert found['baton:engine_spec_accepted_tokens_at_total{mode="null",model_name="m",position="1"}'] == "1.0"
    assert found['baton:engine_spec_accepted_tokens_at_total{mode="null",model_name="m",position="2"}'] == "0.0"


def test_simulated_acceptance_is_a_label_of_all_metrics_and_plain_servers_have_none_of_these():
    simulated = ServerMetrics("m", "null", speculates=True, simulated=True).render(state()).decode()
    own = [line for line in simulated.splitlines() if line.startswith(("baton:", "sglang:"))]
    assert own and all('simulated="true"' in line for line in own)
    plain = ServerMetrics("m", "null").render(None).decode()
    assert "spec_" not in plain and "simulated" not in plain


def test_data_parallel_ranks_report_their_mean_acceptance_and_the_sum_of_drafts():
    both = merge_states([state(spec_accept_length=2.0), state(spec_accept_length=3.0)])
    assert both.gauges["spec_accept_length"] == 2.5 and both.counters["spec_draft_tokens"] == 4
