"""sglang-router's command line: each of its flags works or is refused with a sentence."""

from __future__ import annotations

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.cli import parse
from baton.router.compat import REFUSED, translate
from baton.router.config import RouterConfig

SAME = """
--host h|--port 1|--worker-urls http://a:1 http://b:2|--policy round_robin|--policy random|--policy power_of_two
--policy cache_aware|--cache-threshold 0.3|--balance-abs-threshold 64|--balance-rel-threshold 1.5
--eviction-interval-secs 60|--max-tree-size 67108864|--max-payload-size 1000|--worker-startup-timeout-secs 1800
--log-dir /tmp/x|--log-level warn|--prometheus-port 29000|--prometheus-host 0.0.0.0|--request-id-headers x-a x-b
--request-timeout-secs 1800|--shutdown-grace-period-secs 180|--cors-allowed-origins http://localhost:3000
--retry-max-retries 5|--retry-initial-backoff-ms 50|--retry-max-backoff-ms 30000|--retry-backoff-multiplier 1.5
--retry-jitter-factor 0.2|--disable-retries|--cb-failure-threshold 10|--cb-success-threshold 3
--cb-timeout-duration-secs 60|--cb-window-duration-secs 120|--disable-circuit-breaker|--health-failure-threshold 3
--health-success-threshold 2|--health-check-timeout-secs 5|--health-check-interval-secs 60
--health-check-endpoint /health|--backend sglang|--backend=openai|--history-backend none
--client-cert-path a --client-key-path b|--ca-cert-paths a b|--tls-cert-path a --tls-key-path b|--enable-trace
--otlp-traces-endpoint localhost:4317|--api-key k|--control-plane-api-keys 1:me:admin:k
--pd-disaggregation --prefill http://p:1 9000 --prefill http://q:1 none --prefill http://r:1 --decode http://d:1
--pd-disaggregation --prefill-policy cache_aware --decode-policy round_robin
""".replace("\n", "|").strip("|").split("|")


@pytest.mark.parametrize("flags", SAME)
def test_same_flags(flags):
    parse(RouterConfig, translate(flags.split()), prog="launch_router", description="")


@pytest.mark.parametrize("flag", sorted(REFUSED))
@pytest.mark.parametrize("form", ["{} 1", "{}=1"])
def test_refused_flags_say_why(flag, form):
    with pytest.raises(ConfigError, match=f"^{flag} is not supported: .{{20,}}"):
        translate(["--port", "1", *form.format(flag).split()])


def test_history_of_conversations_is_refused():
    with pytest.raises(ConfigError, match="--history-backend redis is not supported"):
        translate(["--history-backend", "redis"])


async def test_metrics_on_a_port_of_their_own(router, unused_tcp_port):
    import asyncio

    await router(prometheus_port=unused_tcp_port, prometheus_host="127.0.0.1", api_key="k")
    for path, status in (("/metrics", b"200"), ("/generate", b"404")):
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: r\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == status
        writer.close()


async def test_health_check_endpoint(router, worker, script):
    mock = await worker(script.status(500))
    front = await router(mock, health_check_endpoint="/alive", wait=False)
    await script.until(lambda: mock.posts)
    assert mock.posts[0].target == b"/alive"
    mock.behaviour = script.answer
    await script.until(lambda: front.registry.available("regular"))


def test_log_dir(tmp_path):
    import logging

    from baton.router import logs

    logs.configure("info", str(tmp_path / "deep"))
    logger = logging.getLogger("baton.router")
    logger.info("hello")
    handlers = logger.handlers[:]
    logger.handlers.clear()
    logger.propagate = True
    for handler in handlers:
        handler.close() if isinstance(handler, logging.FileHandler) else None
    assert '"message":"hello"' in (tmp_path / "deep" / "router.log").read_text()
    with pytest.raises(ConfigError, match="--log-dir"):
        logs.configure("info", "/proc/nowhere")
