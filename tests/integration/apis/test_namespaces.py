"""``cache_salt`` and ``extra_key`` on every API, of one server and of a pair: namespaces share no cached page."""

from __future__ import annotations

import urllib.request

import pytest

from baton.tests.helpers.harness import post_json

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
USER = [{"role": "user", "content": PROMPT}]
BODIES = {
    "/generate": {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/responses": {"input": USER, "max_output_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
}


def cached_tokens(server) -> float:
    """The cached tokens that a server has counted."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("baton:cached_tokens"))


@pytest.mark.parametrize("name", ["unified", "relay"])
@pytest.mark.parametrize("path", BODIES)
def test_only_equal_namespaces_share_cached_prompts(request, name, path):
    served = request.getfixturevalue(name)
    counting = served if name == "unified" else served.decode[0]
    own = path.strip("/")
    hits = []
    for fields in ({"cache_salt": own}, {"cache_salt": own + "2"}, {"extra_key": own}, {"cache_salt": own},
                   {"extra_key": own}, {"cache_salt": own, "extra_key": own}):
        before = cached_tokens(counting)
        status, answer = post_json(served.url + path, {**BODIES[path], **fields})
        assert status == 200, answer
        hits.append(cached_tokens(counting) - before)
    assert hits[:3] == [0, 0, 0] and hits[5] == 0, hits
    assert hits[3] == hits[4] >= 64, hits


def test_each_prompt_of_a_batch_has_its_salt(unified):
    body = {"text": [PROMPT, PROMPT], "cache_salt": ["x", "y"], "sampling_params": {"max_new_tokens": 1}}
    for full in (False, True):
        status, answers = post_json(unified.url + "/generate", body)
        assert status == 200 and [answer["meta_info"]["cached_tokens"] > 0 for answer in answers] == [full, full]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields, sentence", [
    ({"cache_salt": ""}, "cache_salt must have 1 to 256 characters, got 0; leave it out"),
    ({"extra_key": "k" * 257}, "extra_key must have 1 to 256 characters, got 257"),
    ({"cache_salt": ["a", "b"]}, "cache_salt holds 2 entries for 1 prompts"),
    ({"cache_salt": 3}, "cache_salt: expected str"),
])
def test_refused_salts(unified, path, fields, sentence):
    status, answer = post_json(unified.url + path, {**BODIES[path], **fields})
    assert status == 400 and sentence in str(answer), answer
