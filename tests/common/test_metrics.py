"""What a scrape of a server shows of its engine's counters."""

from baton.common.api.messages import State
from baton.common.obs.metrics import ServerMetrics


def scrape(counters):
    state = State(seq=0, total_pages=4, free_pages=4, held_pages=0, cached_pages=0, page_size=1, num_running=0,
                  num_waiting=0, num_transferring=0, counters=counters)
    lines = ServerMetrics("m", "decode").render(state).decode().splitlines()
    return {line for line in lines if line.startswith("baton:engine_")}


def test_failed_transfers_are_one_metric_by_code():
    assert scrape({"kv_transfers_failed_deadline_exceeded": 2.0, "kv_transfers_failed_request_aborted": 1.0}) == {
        'baton:engine_kv_transfers_failed_total{code="deadline_exceeded",mode="decode",model_name="m"} 2.0',
        'baton:engine_kv_transfers_failed_total{code="request_aborted",mode="decode",model_name="m"} 1.0'}


def test_other_counters_are_metrics_of_their_own():
    assert scrape({"kv_transfers_done": 3.0, "prompt_tokens": 9.0}) == {
        'baton:engine_kv_transfers_done_total{mode="decode",model_name="m"} 3.0'}
