"""The verdicts of tests/bench/router_compare.py, from rows as the harness writes them."""

from __future__ import annotations

from baton.tests.bench.router_compare import BOUNDS, ERRORS, OURS, PAIRS, PEER, WHOLE, by_mode, judge, table


def row(target, scenario, **medians):
    return {"target": target, "scenario": scenario, "bad": 0, "foreign": [0.1, 0.1, 0.1],
            **{name: [value, value, value] for name, value in medians.items()}}


def rows(mode, rate, cpu, alone, ttft, delivery):
    """Our router compared with a peer of 10,000 req/s that adds 50 us."""
    return [row("direct", "json1", p50_us=20), row(PEER[mode], "json64", rps=10_000, cpu_us_per_req=90),
            row(PEER[mode], "json1", p50_us=70), row(OURS, "json64", rps=rate, cpu_us_per_req=cpu),
            row(OURS, "json1", p50_us=alone), row(OURS, "spaced", ttft_p50_us=ttft, deliv_p99_us=delivery)]


def verdicts(whole, pairs):
    judged = judge(by_mode({WHOLE: whole, PAIRS: pairs}), BOUNDS + ERRORS)
    return {(found["mode"], found["target"]): found["verdict"] for found in judged}


def test_figures_within_all_bounds_pass():
    found = verdicts(rows(WHOLE, 20_000, 25, 45, 1900, 900), rows(PAIRS, 25_000, 35, 45, 1900, 900))
    assert set(found.values()) == {"pass"}


def test_each_figure_out_of_its_bound_fails():
    found = verdicts(rows(WHOLE, 19_900, 25.1, 46, 2100, 1100), rows(PAIRS, 24_900, 35.1, 46, 2100, 1100))
    failed = {key for key, verdict in found.items() if verdict == "FAIL"}
    assert failed == set(found) - {(WHOLE, "failed requests"), (PAIRS, "failed requests")}


def test_a_router_that_never_answered_is_not_measured():
    whole, pairs = rows(WHOLE, 20_000, 25, 45, 1900, 900), rows(PAIRS, 25_000, 35, 45, 1900, 900)
    without_peer = [found for found in whole if found["target"] != PEER[WHOLE]]
    found = verdicts(without_peer, pairs)
    assert found[WHOLE, "req/s over sglang-router's"] == "not measured"
    assert found[WHOLE, "added p50 over sglang-router's"] == "not measured"
    assert found[PAIRS, "req/s over sglang-router's"] == "pass"


def test_the_table_names_every_router_and_target():
    runs = by_mode({WHOLE: rows(WHOLE, 20_000, 25, 45, 1900, 900), PAIRS: rows(PAIRS, 1, 35, 45, 1900, 900)})
    shown = table(runs, judge(runs, BOUNDS), "the command")
    assert "| whole | ours | 20,000 | 25.0 | - | 25 | 1.90 | 0.90 |" in shown
    assert "| pairs | req/s over sglang-router's | >= 2.5 | 0.00 | FAIL |" in shown
