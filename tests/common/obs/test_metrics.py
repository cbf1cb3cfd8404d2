"""What a scrape of a server shows of its engine's counters."""

import re
import time
from pathlib import Path

import pytest

from baton.common.api.messages import State
from baton.common.obs.engine_metrics import BREAKAGES, COUNTED_BY_API_SERVER, COUNTERS
from baton.common.obs.metrics import ServerMetrics


def scrape(counters):
    state = State(seq=0, total_pages=4, free_pages=4, held_pages=0, cached_pages=0, page_size=1, num_running=0,
                  num_waiting=0, num_transferring=0, counters=counters)
    lines = ServerMetrics("m", "decode").render(state).decode().splitlines()
    return {line for line in lines if line.startswith("baton:engine_") and not line.endswith(" 0.0")}


def test_failed_transfers_are_one_metric_by_code():
    assert scrape({"kv_transfers_failed_deadline_exceeded": 2.0, "kv_transfers_failed_request_aborted": 1.0}) == {
        'baton:engine_kv_transfers_failed_total{code="deadline_exceeded",mode="decode",model_name="m"} 2.0',
        'baton:engine_kv_transfers_failed_total{code="request_aborted",mode="decode",model_name="m"} 1.0'}


def test_broken_transfers_are_one_metric_by_cause():
    assert scrape({"kv_transfers_broken_silent": 2.0, "kv_transfers_broken_connection_lost": 1.0}) == {
        'baton:engine_kv_transfers_broken_total{cause="silent",mode="decode",model_name="m"} 2.0',
        'baton:engine_kv_transfers_broken_total{cause="connection_lost",mode="decode",model_name="m"} 1.0'}


def test_other_counters_are_metrics_of_their_own():
    assert scrape({"kv_transfers_done": 3.0, "prompt_tokens": 9.0}) == {
        'baton:engine_kv_transfers_done_total{mode="decode",model_name="m"} 3.0'}


def test_metrics_of_sglang_have_its_names_too():
    metrics = ServerMetrics("m", "null")
    metrics.ttft.observe(0.3)
    metrics.count_outcome("stop")
    state = State(seq=0, total_pages=4, free_pages=2, held_pages=1, cached_pages=1, page_size=16, num_running=2,
                  num_waiting=3, num_transferring=0, gauges={"token_usage": 0.25},
                  counters={"prompt_tokens": 8.0, "cached_tokens": 2.0, "generation_tokens": 10.0})
    told = dict(line.rsplit(" ", 1) for line in metrics.render(state).decode().splitlines() if line[0] != "#")
    assert not any(name.startswith("sglang:") and name.replace("sglang:", "baton:") in told
                   and told[name] != told[name.replace("sglang:", "baton:")] for name in told)
    labels = '{mode="null",model_name="m"}'
    for name, value in {"num_running_reqs": 2, "num_queue_reqs": 3, "token_usage": 0.25, "num_used_tokens": 16,
                        "max_total_num_tokens": 64, "cache_hit_rate": 0.25, "gen_throughput": 0,
                        "time_to_first_token_seconds_sum": 0.3, "time_to_first_token_seconds_count": 1}.items():
        assert float(told[f"sglang:{name}{labels}"]) == value, name
    assert told['sglang:num_requests_total{mode="null",model_name="m",outcome="stop"}'] == "1.0"


def told(metrics, state):
    """Values by sample, of one scrape."""
    return dict(line.rsplit(" ", 1) for line in metrics.render(state).decode().splitlines() if line[0] != "#")


def test_throughput_is_of_the_last_seconds_whoever_scrapes(monkeypatch):
    metrics, now = ServerMetrics("m", "null"), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for tokens in [1000] * 10 + [0] * 5:
        metrics.note_throughput()
        metrics.generation_tokens.inc(tokens)
        now += 1.0
    metrics.note_throughput()
    name = 'baton:gen_throughput{mode="null",model_name="m"}'
    idle = State(seq=0, total_pages=4, free_pages=4, held_pages=0, cached_pages=0, page_size=1, num_running=0,
                 num_waiting=0, num_transferring=0)
    assert [float(told(metrics, idle)[name]) for _ in range(3)] == [500.0] * 3


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_counters_are_there_from_the_start_and_all_families_say_what_they_are(mode):
    metrics = ServerMetrics("m", mode)
    lines = metrics.render(None).decode().splitlines()
    shown = {re.split("[{ ]", line)[0] for line in lines if line[0] != "#"}
    assert {"baton:engine_finished_requests_total", "baton:generation_tokens_total", "process_cpu_seconds_total",
            "baton_build_info", "sglang:prompt_tokens_total"} <= shown
    assert ("baton:engine_kv_bytes_sent_total" in shown) is (mode == "prefill")
    assert any('outcome="engine_dead"' in line and line.endswith(" 0.0") for line in lines)
    broken = [line for line in lines if line.startswith("baton:engine_kv_transfers_broken_total{")]
    assert (len(broken) >= 10 and all(line.endswith(" 0.0") for line in broken)) is (mode != "null")
    helps = {line.split()[2]: line.split(maxsplit=3)[3:] for line in lines if line.startswith("# HELP")}
    types = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert all(helps[name] for name in types)
    assert not [name for name, kind in types.items() if kind == "gauge" and name.endswith(("_total", "_count"))]


def test_sglang_s_names_can_be_left_out():
    assert b"sglang:" not in ServerMetrics("m", "null", sglang_names=False).render(None)


def test_every_cause_and_name_in_the_code_is_in_the_tables():
    folder = Path(__file__).parents[3]
    source = "".join(path.read_text() for part in ("kvtransfer", "prefill", "decode", "common")
                     for path in (folder / part).rglob("*.py"))
    assert set(re.findall(r'cause="(\w+)"', source)) | {"peer"} == set(BREAKAGES)
    counted = set(re.findall(r'counters\["(\w+)"\]', source))
    assert counted and counted <= COUNTERS.keys() | COUNTED_BY_API_SERVER


def test_metrics_by_rank_have_its_label():
    metrics = ServerMetrics("m", "null", by_rank=True)
    states = [State(seq=0, total_pages=4, free_pages=free, held_pages=0, cached_pages=0, page_size=16, num_running=1,
                    num_waiting=0, num_transferring=0, gauges={"token_usage": 0.25}, dp_rank=rank,
                    counters={"generation_tokens": 1.0, "retracted_requests": 3.0 + rank})
              for rank, free in enumerate((1, 2))]
    found = told(metrics, states)
    for rank in (0, 1):
        labels = f'{{dp_rank="{rank}",mode="null",model_name="m"}}'
        assert found[f"baton:kv_pages_free{labels}"] == found[f"baton:kv_pages_free{labels}"] == f"{rank + 1}.0"
        assert found[f"baton:engine_retracted_requests_total{labels}"] == f"{3 + rank}.0"
        assert found[f"sglang:num_running_reqs{labels}"] == "1.0"
    assert told(ServerMetrics("m", "null"), states)['baton:kv_pages_free{mode="null",model_name="m"}'] == "3.0"


def test_clients_cannot_make_metrics_grow_for_ever():
    metrics = ServerMetrics("m", "null", custom_labels=("team",))
    for i in range(1100):
        metrics.labelled({"team": f"{i}" * 200}).count_outcome("stop")
    found = [name for name in told(metrics, None) if name.startswith("baton:num_requests_total")
             and 'outcome="stop"' in name]
    assert len(found) == 1002, "1,000 sets, those without labels, and all others"
    assert metrics.labelled({}) is metrics


def test_counts_of_other_processes_are_added_and_stay_when_these_end():
    worker, main = ServerMetrics("m", "null"), ServerMetrics("m", "null")
    worker.ttft.observe(0.3)
    worker.generation_tokens.inc(5)
    worker.count_outcome("odd_code")
    main.ttft.observe(0.3)
    labels = '{mode="null",model_name="m"}'
    for _ in range(2):
        main.others.update(1, worker.counts())
        found = told(main, None)
        assert found[f"baton:time_to_first_token_seconds_count{labels}"] == "2.0"
        assert found[f"sglang:generation_tokens_total{labels}"] == "5.0" and main.tokens.generated == 5
        assert found['baton:num_requests_total{mode="null",model_name="m",outcome="odd_code"}'] == "1.0"
    main.others.end(1)
    main.others.update(1, ServerMetrics("m", "null").counts())
    assert told(main, None)[f"baton:generation_tokens_total{labels}"] == "5.0"
