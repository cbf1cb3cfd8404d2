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
