"""sglang-router's command line: each of its flags works or is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.cli import _flags, parse
from baton.router.config import RouterConfig
from baton.router.sglang_flags import NOT_NEEDED, REFUSED, co_launched, translate

FLAGS = frozenset("""
--host --port --worker-urls --policy --prefill-policy --decode-policy --cache-threshold --balance-abs-threshold
--balance-rel-threshold --bucket-adjust-interval-secs --eviction-interval-secs --max-tree-size --max-idle-secs
--assignment-mode --max-payload-size --dp-aware --enable-igw --mini-lb --pd-disaggregation --prefill --decode
--worker-startup-timeout-secs --worker-startup-check-interval --log-dir --log-level --service-discovery --selector
--service-discovery-port --service-discovery-namespace --prefill-selector --decode-selector --prometheus-port
--prometheus-host --prometheus-duration-buckets --request-id-headers --request-timeout-secs
--shutdown-grace-period-secs --cors-allowed-origins --max-concurrent-requests --queue-size --queue-timeout-secs
--rate-limit-tokens-per-second --retry-max-retries --retry-initial-backoff-ms --retry-max-backoff-ms
--retry-backoff-multiplier --retry-jitter-factor --disable-retries --cb-failure-threshold --cb-success-threshold
--cb-timeout-duration-secs --cb-window-duration-secs --disable-circuit-breaker --health-failure-threshold
--health-success-threshold --health-check-timeout-secs --health-check-interval-secs --health-check-endpoint
--disable-health-check --model-path --tokenizer-path --chat-template --tokenizer-cache-enable-l0
--tokenizer-cache-l0-max-entries --tokenizer-cache-enable-l1 --tokenizer-cache-l1-max-memory --reasoning-parser
--tool-call-parser --mcp-config-path --backend --history-backend --oracle-wallet-path --oracle-tns-alias
--oracle-connect-descriptor --oracle-username --oracle-password --oracle-pool-min --oracle-pool-max
--oracle-pool-timeout-secs --postgres-db-url --postgres-pool-max --redis-url --redis-pool-max --redis-retention-days
--client-cert-path --client-key-path --ca-cert-paths --tls-cert-path --tls-key-path --enable-trace
--otlp-traces-endpoint --api-key --control-plane-api-keys --control-plane-audit-enabled --jwt-issuer --jwt-audience
--jwt-jwks-uri --jwt-role-mapping
""".split())
"""All that sglang_router.launch_router 0.3.2 --help lists. sglang_router.launch_server has them as --router-FLAG,
together with those of a server and --router-dp-worker-base-port."""

SAME = """
--host h|--port 1|--worker-urls http://a:1 http://b:2|--worker-urls|--policy round_robin|--policy random
--policy power_of_two|--policy cache_aware|--policy manual --assignment-mode min_group --max-idle-secs 60
--policy consistent_hashing|--policy bucket --bucket-adjust-interval-secs 5|--prefill-policy bucket
--decode-policy manual|--policy prefix_hash|--cache-threshold 0.3|--balance-abs-threshold 64|--balance-rel-threshold 1.5
--eviction-interval-secs 60|--max-tree-size 67108864|--max-payload-size 1000|--worker-startup-timeout-secs 1800
--log-dir /tmp/x|--log-level warn|--prometheus-port 29000|--prometheus-host 0.0.0.0|--request-id-headers x-a x-b
--request-timeout-secs 1800|--shutdown-grace-period-secs 180|--cors-allowed-origins http://localhost:3000
--retry-max-retries 5|--retry-initial-backoff-ms 50|--retry-max-backoff-ms 30000|--retry-backoff-multiplier 1.5
--retry-jitter-factor 0.2|--disable-retries|--cb-failure-threshold 10|--cb-success-threshold 3
--cb-timeout-duration-secs 60|--cb-window-duration-secs 120|--disable-circuit-breaker|--health-failure-threshold 3
--health-success-threshold 2|--health-check-timeout-secs 5|--health-check-interval-secs 60
--health-check-endpoint /health|--worker-startup-check-interval 30|--disable-health-check
--enable-igw|--backend sglang|--backend=openai|--history-backend none|--dp-aware
--client-cert-path a --client-key-path b|--ca-cert-paths a b|--tls-cert-path a --tls-key-path b|--enable-trace
--otlp-traces-endpoint localhost:4317|--api-key k|--control-plane-api-keys 1:me:admin:k
--pd-disaggregation --prefill http://p:1 9000 --prefill http://q:1 none --prefill http://r:1 --decode http://d:1
--pd-disaggregation --prefill-policy cache_aware --decode-policy round_robin|--max-concurrent-requests 256
--max-concurrent-requests -1|--queue-size 100|--queue-timeout-secs 60|--rate-limit-tokens-per-second 100
--service-discovery --selector app=x role=y --service-discovery-port 8000 --service-discovery-namespace ns
--service-discovery --pd-disaggregation --prefill-selector app=p --decode-selector app=d
""".replace("\n", "|").strip("|").split("|")


DEFAULTS = """
--host 0.0.0.0|--port 30000|--policy cache_aware|--cache-threshold 0.3|--balance-abs-threshold 64
--balance-rel-threshold 1.5|--bucket-adjust-interval-secs 5|--eviction-interval-secs 60|--max-tree-size 67108864
--max-idle-secs 14400|--assignment-mode random|--max-payload-size 536870912|--worker-startup-timeout-secs 1800
--worker-startup-check-interval 30|--log-level info|--service-discovery-port 80|--prometheus-port 29000
--prometheus-host 0.0.0.0|--request-timeout-secs 1800|--shutdown-grace-period-secs 180|--max-concurrent-requests -1
--queue-size 100|--queue-timeout-secs 60|--retry-max-retries 5|--retry-initial-backoff-ms 50
--retry-max-backoff-ms 30000|--retry-backoff-multiplier 1.5|--retry-jitter-factor 0.2|--cb-failure-threshold 10
--cb-success-threshold 3|--cb-timeout-duration-secs 60|--cb-window-duration-secs 120|--health-failure-threshold 3
--health-success-threshold 2|--health-check-timeout-secs 5|--health-check-interval-secs 60
--health-check-endpoint /health
""".replace("\n", "|").strip("|").split("|")
"""sglang_router.launch_router 0.3.2's own."""


def as_documented(default) -> str:
    return "none" if default is None else f"{default:.10g}" if isinstance(default, float) else str(default)


def test_defaults_that_differ_are_documented_with_their_reason():
    page = (Path(__file__).resolve().parents[3] / "docs/router.md").read_text()
    table = page.partition("| flag | sglang-router | Baton | why |\n")[2].partition("\n\n")[0].splitlines()[1:]
    documented = {cells[1].strip("` "): (cells[2].strip(), cells[3].strip(), cells[4].strip())
                  for cells in (row.split("|") for row in table)}
    own = {spelling: item.field.default for item in _flags(RouterConfig)
           for spelling in ("--" + item.key.replace("_", "-"), *item.field.metadata["names"])}
    theirs = dict(line.split() for line in DEFAULTS)
    differ = {flag for flag, value in theirs.items() if as_documented(own[flag]) != value}
    assert differ == documented.keys()
    for flag, (there, here, why) in documented.items():
        assert (there, here) == (theirs[flag], as_documented(own[flag]))
        assert len(why) > 30


def test_every_flag_is_taken_or_refused():
    taken = {word.partition("=")[0] for flags in SAME for word in flags.split() if word.startswith("--")}
    assert taken | REFUSED.keys() | NOT_NEEDED.keys() == FLAGS
    assert len(taken) + len(REFUSED) + len(NOT_NEEDED) == len(FLAGS)


@pytest.mark.parametrize("flags", SAME)
def test_same_flags(flags):
    parse(RouterConfig, translate(flags.split()), prog="launch_router", description="")


@pytest.mark.parametrize("flag", sorted(NOT_NEEDED))
@pytest.mark.parametrize("form", ["{} 1", "{}=1"])
def test_flags_for_grpc_workers_change_nothing(flag, form, capsys):
    if "enable" in flag:
        form = "{}"
    assert translate(["--port", "1", *form.format(flag).split(), "--dp-aware"]) == ["--port", "1", "--dp-aware"]
    assert capsys.readouterr().err.startswith(f"launch_router: {flag} is not needed: ")


@pytest.mark.parametrize("flag", sorted(REFUSED))
@pytest.mark.parametrize("form", ["{} 1", "{}=1"])
def test_refused_flags_say_why(flag, form):
    with pytest.raises(ConfigError, match=f"^{flag} is not supported: .{{20,}}"):
        translate(["--port", "1", *form.format(flag).split()])


def test_grpc_workers_are_refused():
    with pytest.raises(ConfigError, match="is not supported: give the worker's HTTP address"):
        translate("--worker-urls http://a:1 grpc://b:2".split())


def test_co_launch_takes_the_router_s_flags_by_prefix():
    own, of_router = co_launched(
        "--model-path m --router-policy random --dp-size 2 --router-dp-worker-base-port 31000 --router-backend sglang "
        "--router-request-id-headers x-a x-b --port 9 --router-dp-aware --router-queue-size=7".split())
    assert own == "--model-path m --dp-size 2 --router-dp-worker-base-port 31000 --port 9".split()
    assert of_router == "--policy random --request-id-headers x-a x-b --dp-aware --queue-size=7".split()


@pytest.mark.parametrize(("flags", "sentence"), [
    ("--router-mini-lb", "leave the flag away"), ("--router-worker-urls http://a:1", "starts the workers"),
    ("--router-pd-disaggregation", "starts the workers"), ("--router-prefill=http://a:1", "starts the workers"),
])
def test_co_launch_refuses_what_cannot_be(flags, sentence):
    with pytest.raises(ConfigError, match=sentence):
        co_launched(flags.split())


def test_history_of_conversations_is_refused():
    with pytest.raises(ConfigError, match="--history-backend redis is not supported"):
        translate(["--history-backend", "redis"])


async def test_metrics_on_a_port_of_their_own(start_router, unused_tcp_port):
    import asyncio

    await start_router(prometheus_port=unused_tcp_port, prometheus_host="127.0.0.1", api_key="k")
    for path, status in (("/metrics", b"200"), ("/generate", b"404")):
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: r\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == status
        writer.close()


async def test_health_check_endpoint(start_router, worker, script):
    mock = await worker(script.status(500))
    router = await start_router(mock, health_check_endpoint="/alive", wait=False)
    await script.until(lambda: mock.posts)
    assert mock.posts[0].target == b"/alive"
    mock.behaviour = script.answer
    await script.until(lambda: router.registry.available("regular"))
