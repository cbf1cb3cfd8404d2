"""Answers by llguidance's grammars from a pair of servers, of which decode speculates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from baton.tests.helpers.grammar_requests import GrammarRequest
from baton.tests.helpers.harness import Cluster, post_json
from baton.tests.helpers.json_schemas import BY_HAND

NAMES = ["flat", "optional between required", "array of objects", "tuple", "recursive tree", "map", "person"]
TOOLS = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
    "required": ["city", "days"], "additionalProperties": False}}}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Cluster]:
    flags = ["--constrained-json-disable-any-whitespace", "--page-size", "8"]
    with Cluster(tmp_path_factory.mktemp("llguidance"), flags=[*flags, "--grammar-backend", "llguidance"],
                 decode_flags=["--speculative-algorithm", "NGRAM"]) as cluster:
        yield cluster


def generate(url: str, **sampling) -> tuple[str, str]:
    body = {"text": "The answer is", "sampling_params": {"temperature": 0, "max_new_tokens": 200} | sampling}
    status, answer = post_json(url + "/generate", body)
    assert status == 200, answer
    return answer["text"], answer["meta_info"]["finish_reason"]["type"]


def test_a_pair_answers_as_one_server_does(pair):
    def both(name: str) -> None:
        whole = generate(pair.url, json_schema=BY_HAND[name], max_new_tokens=400)
        assert whole == generate(pair.decode[0].url, json_schema=BY_HAND[name], max_new_tokens=400), name
        assert whole[1] == "stop", (name, whole)
        jsonschema.validate(json.loads(whole[0]), BY_HAND[name])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(both, NAMES))
    for server in pair.workers:
        server.assert_clean()


def test_requests_of_all_kinds(pair):
    """A sample of tests/bench/grammar_speculation.py."""
    def ask(number: int) -> str:
        request = GrammarRequest.draw(number)
        kind, source = request.grammar
        status, reply = post_json(f"{pair.url}/generate", {
            "text": request.question, "sampling_params": {kind: source, **request.sampling}})
        assert status == 200, reply
        reason = reply["meta_info"]["finish_reason"]["type"]
        assert reason == "length" or request.is_valid(reply["text"]), (request, reply["text"])
        return reason

    with ThreadPoolExecutor(16) as threads:
        reasons = list(threads.map(ask, range(40)))
    assert reasons.count("stop") > 20


def test_reasoning_tools_and_grammars_of_other_kinds(pair):
    for ebnf in ('root ::= "yes" | "no" | "per" "haps"?', '%llguidance {}\nstart: "yes" | "no"'):
        assert generate(pair.url, ebnf=ebnf)[0] in ("yes", "no", "per", "perhaps")
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text", "excludes": ["<"]}, "end": "</think>"},
        {"type": "json_schema", "json_schema": {"type": "boolean"}}]}}
    text, reason = generate(pair.url, structural_tag=tag, logit_bias={}, max_new_tokens=300)
    assert text.startswith("<think>") and (reason == "length" or text.rpartition("</think>")[2] in ("true", "false"))
    status, answer = post_json(f"{pair.url}/v1/chat/completions", {
        "model": "tinychat", "messages": [{"role": "user", "content": "How is the weather in Paris?"}], "tools": TOOLS,
        "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 200})
    assert status == 200, answer
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}


def test_mistakes_are_told(pair):
    for fields, words in (({"regex": "("}, "unclosed group"), ({"ebnf": "root ::= x"}, "not defined"),
                          ({"structural_tag": '{"type":"structural_tag","format":{"type":"no"}}'}, "unknown to this")):
        status, answer = post_json(f"{pair.url}/generate", {"text": "x", "sampling_params": fields})
        assert status == 400 and words in answer["error"]["message"], answer
    for server in pair.workers:
        server.assert_clean()
