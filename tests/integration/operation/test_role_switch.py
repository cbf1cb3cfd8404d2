"""Roles of servers that change under load: every stream ends with the tokens that it has without a change."""

import json
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.tests.helpers.harness import Cluster, get_json, post_json
from baton.tests.helpers.ports import free_ports

CLIENTS = 32
PROMPTS = [f"Question {number}: what is {number} plus {number * 7}? Answer in words." for number in range(CLIENTS)]
SWITCHES = ("decode", "null", "prefill")


def stream(url, number, tokens=24, leaves=False):
    """The text of a streamed completion; a client that ``leaves`` does so after the first token."""
    body = {"model": "tinychat", "prompt": PROMPTS[number], "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    texts, done = [], False
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                texts += [choice["text"] for choice in chunk["choices"]]
                if leaves:
                    return None
    assert done, "the stream broke off"
    return "".join(texts)


def switch(url, body, path="/switch_role"):
    status, answer = post_json(url + path, body)
    assert status == 200 and answer["success"], answer


def refusal(url, body):
    status, answer = post_json(url + "/switch_role", body)
    return status, answer["error"]["message"]


class Load:
    """Clients that send one stream after the other until the load ends."""

    def __init__(self, url, expected):
        self._url, self._expected = url, expected
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self.wrong, self.count = [], 0

    def __enter__(self):
        self._clients = [self._pool.submit(self._run, number) for number in range(CLIENTS)]
        return self

    def _run(self, number):
        while not self._stop.is_set():
            stream(self._url, number, leaves=self.count % 4 == 0)
            text = stream(self._url, number)
            self.count += 1
            if text != self._expected[number]:
                self.wrong.append((number, text))

    def __exit__(self, *exc):
        self._stop.set()
        for client in self._clients:
            client.result()  # raises what a stream raised
        self._pool.shutdown()


def states(url):
    return get_json(url + "/get_server_info")["internal_states"]


def served(url):
    return sum(state["counters"]["finished_requests"] for state in states(url))


def cached_pages(url):
    return sum(state["cached_pages"] for state in states(url))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    port = free_ports(1)[0]
    with Cluster(tmp_path_factory.mktemp("roles"), prefill=2, flags=["--enable-pd-role-switch"],
                 decode_flags=["--disaggregation-bootstrap-port", str(port)],
                 router_flags=["--policy", "round_robin", "--health-check-interval-secs", "1"]) as cluster:
        yield cluster


def workers_of(cluster):
    return {worker["url"]: worker for worker in get_json(cluster.url + "/list_workers")["workers"]}


def test_a_server_takes_each_role_under_load(cluster):
    """Each switch is answered once the server takes requests in its new role, and none of 32 streams notices it."""
    switch_under_load(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--tp-size", "2"], ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]])
def test_servers_of_several_ranks_take_each_role_under_load(tmp_path, flags):
    port = free_ports(1)[0]
    with Cluster(tmp_path, prefill=2, flags=["--enable-pd-role-switch", *flags],
                 decode_flags=["--disaggregation-bootstrap-port", str(port)]) as cluster:
        switch_under_load(cluster)


def switch_under_load(cluster):
    with ThreadPoolExecutor(CLIENTS) as pool:
        expected = list(pool.map(lambda number: stream(cluster.url, number), range(CLIENTS)))
    switched = cluster.prefill[1].url
    cached = cached_pages(switched)
    assert cached > 0
    with Load(cluster.url, expected) as load:
        for role in SWITCHES:
            before = served(switched)
            began, count = time.monotonic(), load.count
            switch(cluster.url, {"url": switched, "role": role})
            answered = time.monotonic() - began
            assert answered < 5.0, "slow even for servers that share two cores with their clients"
            assert get_json(switched + "/get_server_info")["disaggregation_mode"] == role
            assert workers_of(cluster)[switched]["role"] == ("prefill" if role == "prefill" else "decode")
            while load.count < count + CLIENTS or served(switched) < before + 8:  # also requests of the new role
                assert time.monotonic() < began + 60.0, "the server gets no requests in its new role"
                time.sleep(0.05)
            print(f"{role}: the router answered after {answered:.3f} s")
    assert not load.wrong and load.count >= 3 * CLIENTS
    assert cached_pages(switched) >= cached
    for server in cluster.workers:
        server.assert_clean()


def test_the_bootstrap_port_comes_and_goes(cluster):
    decode = cluster.decode[0]
    port = int(decode.argv[decode.argv.index("--disaggregation-bootstrap-port") + 1])
    health = f"http://127.0.0.1:{port}/health"
    with pytest.raises(OSError):
        urllib.request.urlopen(health, timeout=5)
    for role in ("prefill", "decode", "prefill"):  # it stays open for a while, and is open afterwards
        switch(decode.url, {"new_role": role}, "/pd_role_switch")
    assert urllib.request.urlopen(health, timeout=5).status == 200
    # The router notices without being asked; one of the others decodes meanwhile.
    deadline = time.monotonic() + 10.0
    while workers_of(cluster)[decode.url]["role"] != "prefill":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert workers_of(cluster)[decode.url]["bootstrap_port"] == port
    switch(cluster.url, {"url": cluster.prefill[0].url, "role": "decode"})
    assert stream(cluster.url, 0, tokens=4)
    switch(cluster.url, {"url": decode.url, "role": "decode", "server_args": {
        "max_running_requests": 7}})
    switch(cluster.url, {"url": cluster.prefill[0].url, "role": "prefill"})
    assert stream(cluster.url, 0, tokens=4)
    deadline = time.monotonic() + 20.0
    while True:
        try:
            urllib.request.urlopen(health, timeout=5).close()
        except OSError:
            break
        assert time.monotonic() < deadline, "the bootstrap server still runs"
        time.sleep(0.2)


def test_wrong_switches_are_refused(cluster):
    code, message = refusal(cluster.url, {"url": cluster.decode[0].url, "role": "prefill"})
    assert code == 409 and "is the only healthy decode worker" in message
    code, message = refusal(cluster.url, {"url": cluster.decode[0].url, "role": "both"})
    assert (code, message) == (400, "role must be prefill, decode or null (both phases), not 'both'.")
    assert refusal(cluster.url, {"url": "http://127.0.0.1:1", "role": "decode"})[0] == 404
    assert refusal(cluster.url, {"role": "decode"})[0] == 400
    assert refusal(cluster.decode[0].url, {})[0] == 400
