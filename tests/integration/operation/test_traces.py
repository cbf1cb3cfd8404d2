"""One trace over router, prefill, transfer and decode, as a collector receives it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from baton.tests.helpers.harness import Cluster, post_json
from baton.tests.helpers.ports import free_port

pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")


class Collector:
    """Takes OTLP over HTTP; ``spans()`` are all that came, as ``{name: span}`` with their service."""

    def __init__(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans = spans = {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in sent.resource_spans:
                    service = resource.resource.attributes
                    name = next(a.value.string_value for a in service if a.key == "service.name")
                    for scope in resource.scope_spans:
                        spans.update({(name, span.name): span for span in scope.spans})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self.port = free_port()
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector():
    running = Collector()
    yield running
    running.close()


def test_a_request_through_a_pair_is_one_trace(tmp_path, collector):
    to = ["--otlp-traces-endpoint", f"http://127.0.0.1:{collector.port}/v1/traces"]
    with Cluster(tmp_path, flags=to, router_flags=("--policy", "round_robin", *to)) as cluster:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        assert post_json(cluster.url + "/generate", body)[0] == 200
    spans = collector.spans  # the processes have told the rest on their way out
    assert spans.keys() >= {
        ("baton-router", "router.request"),
        ("baton-prefill", "prefill.request"), ("baton-prefill", "meeting"), ("baton-prefill", "queue"),
        ("baton-prefill", "prefill"), ("baton-prefill", "transfer"),
        ("baton-decode", "decode.request"), ("baton-decode", "queue"), ("baton-decode", "transfer"),
        ("baton-decode", "decode")}
    assert len({span.trace_id for span in spans.values()}) == 1
    root = spans["baton-router", "router.request"]
    for role in ("prefill", "decode"):
        mine = spans[f"baton-{role}", f"{role}.request"]
        assert mine.parent_span_id == root.span_id
        stages = [span for (service, _), span in spans.items() if service == f"baton-{role}" and span is not mine]
        assert {span.parent_span_id for span in stages} == {mine.span_id}
        stages.sort(key=lambda span: span.start_time_unix_nano)
        ends = [span.end_time_unix_nano for span in stages]
        begins = [span.start_time_unix_nano for span in stages[1:]]
        assert ends == sorted(ends) and all(abs(end - begin) < 5e6 for end, begin in zip(ends, begins))
