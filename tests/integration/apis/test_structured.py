"""Structured output by HTTP: a prefill and a decode server behind the router answer as one server does."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import jsonschema
import openai
import pytest

from baton.tests.helpers.harness import Cluster, Server, post_json
from baton.tests.helpers.json_schemas import BY_HAND, CORPUS
from baton.tests.helpers.ports import free_port

NAMES = ["flat", "nested", "optional between required", "array of objects", "tuple", "anyOf objects", "ref",
         "recursive tree", "date-time", "phone pattern", "unicode names", "names to escape", "person"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Cluster]:
    """White space of the model's choice could go on for ever: so small a model does not tire of it."""
    flags = ["--constrained-json-disable-any-whitespace", "--page-size", "8"]
    with Cluster(tmp_path_factory.mktemp("structured"), flags=flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(pair: Cluster) -> Server:
    """A decode server answers requests without a bootstrap room by itself, as a unified server does."""
    return pair.decode[0]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def schema_format(name: str, **more) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": BY_HAND[name], **more}}


def generate(url: str, **sampling) -> tuple[list[int], str, str]:
    body = {"text": "The answer is", "sampling_params": {"temperature": 0, "max_new_tokens": 200} | sampling}
    status, answer = post_json(url + "/generate", body)
    assert status == 200, answer
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]["type"]


def test_slow_grammars_hold_up_nobody_else(pair):
    """Five of seconds each are left behind when their clients go; the small one does not wait for any to end."""
    generate(pair.url, regex="warm")
    words = "|".join(f"w{i}" for i in range(25_000))
    address, slow = urlsplit(pair.url), []
    for i in range(5):
        body = json.dumps({"text": "a", "sampling_params": {"regex": f"({words}|v{i})*"}}).encode()
        slow.append(socket.create_connection((address.hostname, address.port)))
        slow[-1].sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    schema = {"type": "object", "properties": {"small": {"type": "boolean"}}, "required": ["small"]}
    small = generate(pair.url, json_schema=schema)
    answered, _, _ = select.select(slow, [], [], 0)
    for connection in slow:
        connection.close()
    assert json.loads(small[1]).keys() == {"small"} and len(answered) < 2


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "sampling_seed": 11}], ids=["greedy", "sampled"])
def test_a_pair_answers_as_one_server_does(pair, alone, sampling):
    def both(name: str) -> None:
        whole = generate(pair.url, json_schema=json.dumps(BY_HAND[name]), **sampling)
        assert whole == generate(alone.url, json_schema=BY_HAND[name], **sampling), name
        assert whole[2] == "stop"
        jsonschema.validate(json.loads(whole[1]), BY_HAND[name])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(both, NAMES))
    for server in pair.workers:
        server.assert_clean()


@pytest.mark.slow
def test_a_pair_answers_by_every_schema(pair):
    def ask(item) -> None:
        name, schema = item
        _, text, reason = generate(pair.url, json_schema=schema, temperature=1.0, max_new_tokens=500)
        assert reason == "stop", name
        jsonschema.validate(json.loads(text), schema)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(ask, CORPUS.items()))


OTHERS = [
    {"regex": "(ab|cd){3,5}"}, {"ebnf": 'root ::= "yes" | "no" | "per" "haps"?'},
    {"regex": "[a-z ]+", "max_new_tokens": 9},
    {"regex": "[a-z]+", "stop": ["a"], "max_new_tokens": 60},
    {"structural_tag": {"type": "structural_tag", "triggers": ["<n>"],
                        "structures": [{"begin": "<n>", "schema": {"type": "boolean"}, "end": "</n>"}]}}]


def test_other_grammars(pair, alone):
    for options in OTHERS:
        assert generate(pair.url, **options) == generate(alone.url, **options), options


@pytest.mark.slow
def test_other_kinds_of_servers(pair, unified, tmp_path):
    """One that runs both phases, and one with two tensor-parallel ranks."""
    argv = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", "--tp-size", "2",
            "--constrained-json-disable-any-whitespace"]
    two = Server("baton.launch", argv, free_port(), tmp_path / "server.log").start()
    try:
        two.wait_ready()
        for options in OTHERS:
            expected = generate(pair.url, **options)
            assert generate(unified.url, **options) == expected == generate(two.url, **options), options
        for name in NAMES:
            text = generate(two.url, json_schema=BY_HAND[name], temperature=1.0, sampling_seed=5)[1]
            jsonschema.validate(json.loads(text), BY_HAND[name])
        status, answer = post_json(two.url + "/generate", {"text": "x", "sampling_params": {"regex": "("}})
        assert status == 400 and "parenthesis" in answer["error"]["message"]
        two.assert_clean()
    finally:
        two.stop()


@pytest.mark.parametrize("name", NAMES[:4])
def test_chats_streamed_and_not(pair, name):
    options = {"model": "tinychat", "messages": QUESTION, "response_format": schema_format(name, strict=True),
               "temperature": 1.0, "seed": 4, "max_tokens": 300}
    whole = client(pair.url).chat.completions.create(**options).choices[0]
    chunks = [chunk.choices[0] for chunk in client(pair.url).chat.completions.create(stream=True, **options)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content), BY_HAND[name])


def test_json_object_and_choices(pair):
    answer = client(pair.url).chat.completions.create(
        model="tinychat", messages=QUESTION, n=3, temperature=1.0, seed=1, max_tokens=200,
        response_format=schema_format("person"))
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), BY_HAND["person"])
    text = client(pair.url).chat.completions.create(
        model="tinychat", messages=QUESTION, temperature=0, max_tokens=30,
        response_format={"type": "json_object"}).choices[0].message.content
    assert text.startswith("{") and "\n" not in text


@pytest.mark.parametrize("cut", [1, 6, 15])
def test_an_answer_goes_on_with_another_server(pair, alone, cut):
    """What the router sends when a stream breaks: the tokens that were told come behind the prompt."""
    options = {"json_schema": BY_HAND["person"], "temperature": 1.0, "sampling_seed": 3}
    whole = generate(alone.url, **options)
    body = {"text": "The answer is", "sampling_params": {"max_new_tokens": 200} | options,
            "continuation": {"token_ids": whole[0][:cut]}}
    for url in (pair.url, alone.url):
        status, answer = post_json(url + "/generate", body)
        assert (status, answer["output_ids"], answer["text"]) == (200, *whole[:2])


@pytest.mark.parametrize(("body", "param", "words"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strnig"}}}},
     "response_format.json_schema.schema", "strnig"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {"not": {}}}}},
     "response_format.json_schema.schema", "not cannot be enforced"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"regex": "("}, "regex", "parenthesis"), ({"ebnf": "root ::= x"}, "ebnf", "not defined"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "exclude each other"),
    ({"structural_tag": "{"}, "structural_tag", "not valid JSON"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "no"}}}, "response_format", "no"),
    ({"json_schema": "[" * 5000}, "json_schema", "JSON"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_mistakes_are_told(pair, body, param, words):
    for url in (pair.url, pair.decode[0].url):
        status, answer = post_json(url + "/v1/chat/completions", {"model": "tinychat", "messages": QUESTION, **body})
        assert status == 400 and answer["error"]["param"] == param and words in answer["error"]["message"], answer
    assert all(server.process.poll() is None for server in pair.workers)


def test_no_answer_waits_for_a_grammar(pair):
    """While one grammar takes seconds, answers without one, and by known ones, go on."""
    generate(pair.url, regex="yes")
    heavy = {"text": "x", "sampling_params": {"regex": "(" + "|".join(f"w{i}" for i in range(12_000)) + ")*"}}
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(post_json, pair.url + "/generate", heavy)
        answered = 0
        while not refused.done():
            assert generate(pair.url, max_new_tokens=3)[2] == "length" and generate(pair.url, regex="yes")[1] == "yes"
            answered += not refused.done()
        assert answered >= 2
        status, answer = refused.result()
    assert status in (200, 400) and (status == 200 or "compile" in answer["error"]["message"]), answer
