"""cache_exact before real pairs: both roles' caches are followed, pairs are chosen by both, restarts are noticed."""

from __future__ import annotations

import time
from random import Random

import pytest

from baton.tests.helpers.harness import Cluster, get_json, post_json
from baton.tests.helpers.ports import free_ports

WORDS = ("river", "stone", "window", "garden", "morning", "letter", "bridge", "winter", "market", "mountain")
TRIES = 3


def prompt(seed: int, count: int = 150) -> str:
    rng = Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def ask(cluster: Cluster, text: str) -> dict:
    """The answer's counts."""
    status, answer = post_json(cluster.url + "/generate", {
        "text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0}})
    assert status == 200, answer
    return answer["meta_info"]


def cached(cluster: Cluster) -> dict[str, int | None]:
    """Tokens in each worker's cache as the router follows it, by URL."""
    return {worker["url"]: worker["cached_tokens"] for worker in get_json(cluster.url + "/list_workers")["workers"]}


def until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def settled(cluster: Cluster) -> dict[str, int | None]:
    """``cached`` once it is what the workers themselves count."""
    until(lambda: all(cached(cluster)[worker.url] == worker.pages()["cached"] * page_size(worker)
                      for worker in cluster.workers))
    return cached(cluster)


def page_size(worker) -> int:
    return get_json(worker.url + "/get_server_info")["page_size"]


def gained(before: dict, after: dict, workers) -> list:
    """Which of the workers cache more than before."""
    return [worker for worker in workers if after[worker.url] > before[worker.url]]


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, prefill=2, decode=2, router_flags=[
        "--policy", "cache_exact", "--health-check-interval-secs", "0.3", "--retry-max-retries", "8"])
    for worker in made.workers:
        worker.argv += ["--kv-events-port", str(free_ports(2)[0])]
    with made:
        until(lambda: None not in cached(made).values())
        yield made


@pytest.mark.timeout(150)
def test_pairs_are_chosen_by_what_both_halves_cache(cluster):
    """Each of a few prompts has one prefill and one decode worker, also after either was killed and came back empty."""
    homes, before = {}, settled(cluster)
    for seed in range(4):
        first = ask(cluster, prompt(seed))
        assert first["cached_tokens"] < 32
        after = settled(cluster)
        (prefill,), (decode,) = gained(before, after, cluster.prefill), gained(before, after, cluster.decode)
        homes[seed], before = (prefill, decode), after
    assert len({prefill for prefill, _ in homes.values()}) == 2  # new prompts go to the emptiest
    assert len({decode for _, decode in homes.values()}) == 2

    for seed in homes:  # What comes again finds all of its beginning, and fills no other cache with it.
        for turn in range(TRIES):
            again = ask(cluster, f"{prompt(seed)} turn {turn}")
            assert again["cached_tokens"] > 0.8 * again["prompt_tokens"] - 32, (seed, again)
    after = settled(cluster)
    assert all(after[url] - before[url] < 150 for url in after), (before, after)

    for victim in homes[0]:
        victim.kill()
        until(lambda victim=victim: cached(cluster)[victim.url] is None)
        ask(cluster, prompt(9))  # the other one serves
        victim.start().wait_ready()
        until(lambda victim=victim: cached(cluster)[victim.url] == 0)
        ask(cluster, prompt(0)), ask(cluster, prompt(10 + cluster.workers.index(victim)))
        until(lambda victim=victim: cached(cluster)[victim.url] > 0)
        again = ask(cluster, f"{prompt(0)} and more")
        assert again["cached_tokens"] > 0.8 * again["prompt_tokens"] - 32, again
        settled(cluster)
