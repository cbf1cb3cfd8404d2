"""The dashboard: its samples, and its page in a headless Chromium (skipped where there is none)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import urllib.request
from pathlib import Path

import pytest

from baton.router.monitoring.dashboard import quantile
from baton.router.monitoring.worker_reports import WorkerReport, _Reading, read, report
from baton.router.obs.metrics import SECONDS


def test_quantiles():
    counts = [0] * (len(SECONDS) + 1)
    assert quantile(counts, 0.5) is None
    counts[3] = 10  # 5 to 10 ms
    assert quantile(counts, 0.5) == pytest.approx(0.0075)
    counts[-1] = 990
    assert quantile(counts, 0.99) == SECONDS[-1]


async def test_samples(start_router, worker, request_to, chat, script):
    stream = script.stream("a", "b", "c", pause=0.02)
    router = await start_router(await worker(stream), await worker(stream))
    router.sampler.sample()
    router.sampler.samples.clear()
    for _ in range(3):
        assert (await chat(router)).status == 200
    await request_to(router, "POST", "/v1/nowhere", b"", "Connection: close\r\n")
    router.sampler.sample()
    sample = (await request_to(router, "GET", "/dashboard/data")).json["samples"][-1]
    assert (sample["requests"], sample["failures"], sample["decisions"], sample["running"]) == (4, 0, 4, 0)
    assert sample["hits"] >= 2
    assert 0.01 < sample["itl_p50"] <= 0.05
    assert (await request_to(router, "GET", f"/dashboard/data?since={sample['at']}")).json["samples"] == []
    assert (await request_to(router, "GET", f"/dashboard/data?since={'9' * 5000}")).json["samples"]


async def test_samples_of_the_queue(start_router, worker, connect, chat, script):
    mock = await worker(script.silence)
    router = await start_router(mock, max_concurrent_requests=1, queue_size=2)
    clients = [await connect(router) for _ in range(3)]
    for client in clients:
        client.send("POST", "/generate", b"{}")
    await script.until(lambda: mock.posts and router._gate.admission.queued == 2)
    assert (await chat(router)).status == 429
    router.sampler.sample()
    sample = router.sampler.samples[-1]
    assert (sample.running, sample.queued, sample.refused, sample.healthy, sample.healthy_prefill) == (1, 2, 1, 1, None)
    for client in reversed(clients):
        client.leave()
    await script.until(lambda: not router._gate.admission.queued)
    router.sampler.sample()
    assert (router.sampler.samples[-1].queued, router.sampler.samples[-1].refused) == (0, 0)


async def test_samples_of_pairs(start_router, worker):
    router = await start_router(prefill=[await worker()], decode=[await worker(), await worker()])
    router.sampler.sample()
    assert (router.sampler.samples[-1].healthy, router.sampler.samples[-1].healthy_prefill) == (2, 1)


OURS = """# HELP baton:num_requests_running x
baton:num_requests_running{mode="decode",model_name="a } b"} 3.0
baton:num_requests_waiting{mode="decode",model_name="m"} 2.0
baton:token_usage{mode="decode",model_name="m"} 0.25
baton:prompt_tokens_total{mode="decode",model_name="m"} %d.0
sglang:prompt_tokens_total{mode="decode",model_name="m"} %d.0
baton:generation_tokens_total{mode="decode",model_name="m"} %d.0
baton:time_to_first_token_seconds_sum{model_name="m"} %f
baton:time_to_first_token_seconds_count{model_name="m"} %d.0
process_start_time_seconds 1000.0
"""
THEIRS = """sglang:num_running_reqs{tp_rank="0"} 1.0
sglang:num_running_reqs{tp_rank="1"} 4.0
sglang:token_usage{tp_rank="0"} 0.5
sglang:token_usage{tp_rank="1"} 0.75
sglang:num_queue_reqs nonsense
"""


def test_reports_are_read_from_either_system_s_metrics():
    before, now = (_Reading(at, read(OURS % (tokens, tokens, 10 * tokens, seconds, count)))
                   for at, tokens, seconds, count in ((10.0, 100, 1.0, 4), (12.0, 300, 2.0, 8)))
    assert report(before, now, 1060.0, None) == WorkerReport(
        running=3.0, waiting=2.0, token_usage=0.25, tokens_in=100.0, tokens_out=1000.0, ttft=0.25, uptime=60.0)
    assert report(now, now._replace(at=14.0), 1060.0, 0.25).ttft == 0.25  # of the requests before
    restarted = report(now, _Reading(14.0, read(OURS % (1, 1, 1, 0.1, 1))), 1060.0, 0.25)
    assert (restarted.tokens_in, restarted.tokens_out) == (0.0, 0.0)
    assert report(None, _Reading(1.0, read(THEIRS)), 0.0, None) == WorkerReport(running=5.0, token_usage=0.75)
    assert read("") == {}


async def test_workers_are_asked_while_somebody_looks(start_router, worker, request_to, script):
    prefill, decode = await worker(), await worker()
    prefill.metrics = decode.metrics = (OURS % (0, 0, 0, 0, 0)).encode()
    router = await start_router(prefill=[prefill], decode=[decode])
    router.sampler.sample()
    assert router.sampler.samples[-1].tokens_in is None

    async def reports():
        return {w["url"]: w["report"] for w in (await request_to(router, "GET", "/dashboard/data")).json["workers"]}

    assert await reports() == {prefill.url: None, decode.url: None}
    await script.until(lambda: router.reports.of(router.registry.get(decode.url)))
    prefill.metrics = decode.metrics = (OURS % (1000, 1000, 500, 1.0, 2)).encode()
    await script.until(lambda: (router.reports.tokens() or (0, 0))[1], 6.0)
    response = await reports()
    assert (response[decode.url]["waiting"], response[decode.url]["ttft"]) == (2.0, 0.5)
    tokens_in, tokens_out = router.reports.tokens()
    assert tokens_in == pytest.approx(2 * tokens_out, rel=0.1)  # prefill's prompts, decode's output
    decode.metrics = None
    decode.behaviour = script.status(500)
    await script.until(lambda: router.reports.of(router.registry.get(decode.url)) is None, 6.0)


async def test_page_is_open_and_its_data_is_not(start_router, request_to):
    router = await start_router(api_key="k")
    page = await request_to(router, "GET", "/dashboard")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"http://" not in page.body.replace(b"http://host:port", b"").replace(b"http://www.w3.org", b"")
    assert (await request_to(router, "GET", "/dashboard/data")).status == 401


# ---------------------------------------------------------------------- in a browser


class Browser:
    """The little of WebDriver's protocol that these tests need."""

    def __init__(self, url: str, profile: str):
        self._url = url
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync", "--window-size=1280,900", f"--user-data-dir={profile}"]
        response = self._call("POST", "/session", {"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": flags}, "unhandledPromptBehavior": "accept"}}})
        self._url += f"/session/{response['sessionId']}"

    def _call(self, method: str, path: str, body=None):
        request = urllib.request.Request(self._url + path, method=method, headers={"content-type": "application/json"},
                                         data=None if body is None else json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)["value"]

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def resize(self, width: int, height: int) -> None:
        """Emulates a phone's screen."""
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": {
            "width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}})

    def run(self, script: str):
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def picture(self) -> bytes:
        return base64.b64decode(self._call("GET", "/screenshot"))

    def quit(self) -> None:
        self._call("DELETE", "")


@pytest.fixture
async def browser(tmp_path, unused_tcp_port):
    if not shutil.which("chromedriver") or not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("needs chromium and chromedriver")
    driver = await asyncio.create_subprocess_exec("chromedriver", f"--port={unused_tcp_port}",
                                                  stdout=asyncio.subprocess.DEVNULL)
    opened = None
    try:
        for _ in range(100):
            try:
                opened = await asyncio.to_thread(Browser, f"http://127.0.0.1:{unused_tcp_port}", str(tmp_path))
                break
            except OSError:
                await asyncio.sleep(0.1)
        assert opened is not None
        yield opened
    finally:
        if opened is not None:
            await asyncio.to_thread(opened.quit)
        driver.terminate()
        await driver.wait()


async def shows(browser: Browser, expression: str) -> None:
    """Waits until a JavaScript expression is true."""
    for _ in range(100):
        if await asyncio.to_thread(browser.run, f"return !!({expression})"):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(await asyncio.to_thread(browser.run, "return document.body.innerText"))


CURVES = ["Requests per second", "Tokens per second", "Running requests", "Queue", "Cache hit rate",
          "Time to first token", "Inter-token latency", "Healthy workers", "Failures", "Retries and clients that left"]


async def test_curves_in_a_browser(start_router, worker, chat, connect, script, browser):
    """Pairs under load: every curve has a line, tiles and rows say what runs where."""
    p, d, other = await worker(), *[await worker(script.stream("a", "b", pause=0.02)) for _ in range(2)]
    for mock in (p, d, other):
        mock.metrics = (OURS % (1, 1, 1, 1.0, 1)).encode()
    router = await start_router(prefill=[p], decode=[d, other], max_concurrent_requests=1, queue_size=2)
    for _ in range(3):
        await chat(router, messages=[{"role": "user", "content": "same " * 200}])
    d.behaviour = other.behaviour = script.silence
    clients = [await connect(router) for _ in range(3)]
    for client in clients:
        client.send("POST", "/generate", b'{"text": "a"}')
    await script.until(lambda: router._gate.admission.queued == 2)
    assert (await chat(router)).status == 429
    await asyncio.to_thread(browser.open, f"http://127.0.0.1:{router.port}/dashboard")
    titles = "[...document.querySelectorAll('.chart h2')].map(title => title.textContent)"
    assert await asyncio.to_thread(browser.run, f"return {titles}") == CURVES
    await shows(browser, "samples.length > 2 && [...document.querySelectorAll('.chart svg')].every(svg => "
                         "svg.querySelector('path')?.getAttribute('d').length > 10)")
    assert await asyncio.to_thread(browser.run, "return samples[samples.length - 1].queued") == 2
    await shows(browser, "[...document.querySelectorAll('.tile')].some(tile => tile.innerText.replace(/\\s+/g, ' ')"
                         ".startsWith('Waiting 2'))")
    for mock, role in ((p, "prefill"), (d, "decode")):
        row = f"document.querySelector('tr[data-url=\"{mock.url}\"]').innerText"
        words = (await asyncio.to_thread(browser.run, f"return {row}")).split()
        assert words[:4] == [mock.url, "tiny", "·", "up"] and words[6:9] == [role, "●", "healthy"]
    await shows(browser, "document.querySelector('#alerts').innerText.includes('1 request was refused')")
    text = await asyncio.to_thread(browser.run, POINTED)
    assert "in 0" in text and ":" in text  # the time of day and the values there
    if folder := os.environ.get("BATON_SCREENSHOTS"):
        (Path(folder) / "curves.png").write_bytes(await asyncio.to_thread(browser.picture))
    for client in reversed(clients):
        client.leave()


POINTED = """const svg = document.querySelectorAll('.chart svg')[1], box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 3, clientY: box.top + 40, bubbles: true}));
return document.querySelectorAll('.tip')[1].textContent;"""


async def test_phone_and_alerts_in_a_browser(start_router, worker, script, browser):
    """At a phone's width nothing is cut off and buttons can be reached; what is wrong is said in words."""
    prefill, decode = await worker(), await worker()
    prefill.metrics = decode.metrics = (OURS % (1, 1, 1, 1.0, 1)).encode()
    router = await start_router(prefill=[prefill], decode=[decode])
    await asyncio.to_thread(browser.resize, 390, 844)
    await asyncio.to_thread(browser.open, f"http://127.0.0.1:{router.port}/dashboard")
    await shows(browser, f"document.querySelector('tr[data-url=\"{prefill.url}\"] .ok')")
    assert not await asyncio.to_thread(browser.run, "return document.querySelector('#alerts').innerText")
    wide = ("[...document.querySelectorAll('button, .card, tr, input')]"
            ".filter(n => n.getBoundingClientRect().right > innerWidth)")
    assert await asyncio.to_thread(browser.run, f"return {wide}.map(n => n.outerHTML)") == []
    assert await asyncio.to_thread(browser.run, "return document.documentElement.scrollWidth <= innerWidth")
    assert await asyncio.to_thread(browser.run, "return document.querySelectorAll('td button').length") == 4
    if folder := os.environ.get("BATON_SCREENSHOTS"):
        await shows(browser, "samples.length > 8")
        (Path(folder) / "phone.png").write_bytes(await asyncio.to_thread(browser.picture))
    decode.health = 503
    await shows(browser, f"document.querySelector('#alerts').innerText.includes('{decode.url} does not answer')")
    await shows(browser, "document.querySelector('#alerts').innerText.includes('No decode worker takes requests')")


async def test_page_in_a_browser(start_router, worker, chat, script, browser):
    """A key opens it, it draws what happens, and its buttons add and remove workers."""
    first, second = await worker(script.stream("a", "b", pause=0.01)), await worker()
    router = await start_router(first, admin_api_key="admin", api_key="client")
    await asyncio.to_thread(browser.open, f"http://127.0.0.1:{router.port}/dashboard")
    await shows(browser, "document.querySelector('#state').textContent == 'key needed'")
    await asyncio.to_thread(browser.run, "key.value = 'admin'; key.onchange()")
    await shows(browser, f"document.querySelector('tr[data-url=\"{first.url}\"] .ok')")
    await shows(browser, "samples.length > 1 && document.querySelector('svg path').getAttribute('d').length > 10")
    await asyncio.to_thread(browser.run, f"document.querySelector('#add [name=url]').value = '{second.url}';"
                                         "document.querySelector('#add button').click()")
    await script.until(lambda: len(router.registry) == 2)
    await shows(browser, f"document.querySelector('tr[data-url=\"{second.url}\"] .ok')")
    await asyncio.to_thread(browser.run, "window.confirm = () => true;"
                            f"document.querySelector('[aria-label=\"Remove {first.url}\"]').click()")
    await script.until(lambda: [w.url for w in router.registry] == [second.url])
    await shows(browser, f"document.querySelector('#message').textContent.includes('{first.url}')")
    await asyncio.to_thread(browser.run, "key.value = 'client'; key.onchange(); window.confirm = () => true;"
                            f"document.querySelector('[aria-label=\"Drain {second.url}\"]').click()")
    await shows(browser, "document.querySelector('#message.bad')?.textContent.includes('admin key')")
    assert len(router.registry) == 1
    if folder := os.environ.get("BATON_SCREENSHOTS"):
        (Path(folder) / "dashboard.png").write_bytes(await asyncio.to_thread(browser.picture))
