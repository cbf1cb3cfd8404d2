"""Sampling parameters and log-probabilities by HTTP: the same from router, prefill and decode as from one server."""

from __future__ import annotations

import json
import math
import urllib.request

import aiohttp
import pytest

from baton.tests.helpers.harness import post_json
from baton.tests.integration.faults import test_continuation as continued

PROMPT = "What is the capital of France? What is the capital of Italy?"
LONG = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
SEEDED = {**LONG, "temperature": 1.2, "seed": 11}
NATIVE = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 6}
COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
CASES = {
    "penalties": (COMPLETIONS, {**LONG, "temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5,
                                "logprobs": 2}),
    "repetition": (COMPLETIONS, {**LONG, "temperature": 0, "repetition_penalty": 1.6, "logprobs": 0}),
    "sampled with all": (COMPLETIONS, {**SEEDED, "frequency_penalty": 0.7, "repetition_penalty": 1.1, "top_p": 0.9,
                                       "logit_bias": {"40": 3, "41": -100}, "logprobs": 3}),
    "n": (COMPLETIONS, {**SEEDED, "n": 3, "presence_penalty": 0.5}),
    "best of": (COMPLETIONS, {**SEEDED, "n": 2, "best_of": 4, "logprobs": 1}),
    "echo": (COMPLETIONS, {**LONG, "temperature": 0, "echo": True}),
    "echo with logprobs": (COMPLETIONS, {**LONG, "temperature": 0, "echo": True, "logprobs": 5}),
    "echo of a batch, alone": (COMPLETIONS, {"prompt": [PROMPT, "Hi"], "max_tokens": 0, "echo": True, "logprobs": 1}),
    "chat": (CHATS, {**CHAT, "temperature": 0.7, "seed": 3, "logprobs": True, "top_logprobs": 20,
                     "frequency_penalty": 0.3}),
    "native": (GENERATE, {"text": PROMPT, "sampling_params": {**NATIVE, "presence_penalty": 1.0},
                          "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
                          "token_ids_logprob": [40, 7, 500], "return_text_in_logprobs": True}),
    "native batch": (GENERATE, {"text": [PROMPT, "Hello, who are you?"], "sampling_params": [
        {**NATIVE, "logit_bias": {"60": 5}}, {**NATIVE, "repetition_penalty": 0.7}], "return_logprob": [True, True],
        "logprob_start_len": [3, -1], "top_logprobs_num": [0, 3], "token_ids_logprob": [None, [9]]}),
    "native score": (GENERATE, {"text": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
                                "logprob_start_len": 2}),
}
_OWN = ("id", "created", "e2e_latency", "cached_tokens", "prompt_tokens_details")


def ask(server, path, body):
    status, answer = post_json(server.url + path, body)
    assert status == 200, answer
    return answer


def same(one, other, where="answer"):
    """Equal but for what is a server's own; numbers within 1e-3."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one.keys() - set(_OWN):
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (mine, theirs) in enumerate(zip(one, other)):
            same(mine, theirs, f"{where}[{i}]")
    elif isinstance(one, float) and isinstance(other, float):
        assert math.isclose(one, other, abs_tol=1e-3), (where, one, other)
    else:
        assert one == other, where


@pytest.mark.parametrize("name", CASES)
def test_a_pair_answers_as_one_server_does(unified, relay, name):
    path, body = CASES[name]
    same(ask(unified, path, body), ask(relay, path, body))
    for worker in relay.workers:
        worker.assert_clean()


def test_penalties_and_bias_change_the_answer(unified):
    plain = ask(unified, GENERATE, {"text": PROMPT, "sampling_params": NATIVE})["output_ids"]
    first = plain[0]

    def told(**params):
        return ask(unified, GENERATE, {"text": PROMPT, "sampling_params": {**NATIVE, **params}})["output_ids"]

    assert first not in told(logit_bias={str(first): -100})
    assert set(told(logit_bias={"77": 100}, frequency_penalty=-2)) == {77}
    assert len(set(told(frequency_penalty=2, presence_penalty=2, logit_bias={"77": 6}))) > len(set(plain)) - 1
    assert told(repetition_penalty=2) != plain


def test_echo_tells_the_prompt_and_its_logprobs(unified):
    score = ask(unified, GENERATE, {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0,
                                    "top_logprobs_num": 1, "sampling_params": {"max_new_tokens": 0}})
    assert score["output_ids"] == [] and score["meta_info"]["output_token_logprobs"] == []
    values = [value for value, _, _ in score["meta_info"]["input_token_logprobs"]]
    ids = [token for _, token, _ in score["meta_info"]["input_token_logprobs"]]
    choice = ask(unified, COMPLETIONS, CASES["echo with logprobs"][1])["choices"][0]
    found = choice["logprobs"]
    assert choice["text"].startswith(PROMPT) and len(choice["text"]) > len(PROMPT)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:len(values)] == pytest.approx(values[1:], abs=1e-3)
    assert len(found["tokens"]) == len(found["text_offset"]) == len(found["top_logprobs"]) == len(values) + 12
    assert all(len(top) <= 5 for top in found["top_logprobs"][1:])
    by_ids = ask(unified, COMPLETIONS, {**CASES["echo"][1], "prompt": ids})["choices"][0]["text"]
    assert by_ids.endswith(choice["text"])  # the ids' text may begin with a token that the tokenizer put in front


def test_an_echo_is_told_once_in_a_stream(relay):
    whole = ask(relay, COMPLETIONS, CASES["echo with logprobs"][1])["choices"][0]
    status, events = stream(relay, {**CASES["echo with logprobs"][1], "stream": True})
    assert status == 200
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    joined = {key: [item for part in parts for item in part[key]] for key in whole["logprobs"]}
    same(whole["logprobs"], joined)
    _, events = stream(relay, {"prompt": PROMPT, "max_tokens": 0, "echo": True, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == PROMPT


def stream(server, body):
    request = urllib.request.Request(server.url + COMPLETIONS, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return answer.status, [json.loads(event) for event in events]


def test_best_of_are_the_likeliest_of_n(unified):
    made = ask(unified, COMPLETIONS, {**SEEDED, "n": 4, "logprobs": 0})["choices"]

    def mean(choice):
        return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])

    ranked = sorted(made, key=mean, reverse=True)
    answer = ask(unified, COMPLETIONS, {**SEEDED, "n": 2, "best_of": 4})
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4 * 12


def test_token_ids_logprobs_are_those_of_the_distribution(unified):
    answer = ask(unified, GENERATE, CASES["native"][1])
    info = answer["meta_info"]
    of_prompt = info["input_token_ids_logprobs"]
    assert len(of_prompt) == info["prompt_tokens"] and of_prompt[0] is None
    assert [[token for _, token, _ in listed] for listed in info["output_token_ids_logprobs"]] == [[40, 7, 500]] * 8
    likeliest = [top[0][1] for top in info["output_top_logprobs"]]
    listed = ask(unified, GENERATE, {**CASES["native"][1], "token_ids_logprob": likeliest})["meta_info"]
    for step, top in enumerate(info["output_top_logprobs"]):
        assert listed["output_token_ids_logprobs"][step][step] == pytest.approx(top[0], abs=1e-4)


async def test_a_pair_goes_on_with_an_answer_as_it_would_have_gone(relay):
    """Output that was answered before counts as output for penalties, on prefill as on decode."""
    body = {key: value for key, value in CASES["sampled with all"][1].items() if key != "logprobs"} | {
        "min_tokens": 10, "frequency_penalty": 1.5, "ignore_eos": False}
    async with aiohttp.ClientSession(relay.url) as http:
        whole = await continued.stream(http, COMPLETIONS, body)
        ids = [token for event in whole for token in continued.ids_of(event)]
        for count in (1, 5, len(ids) - 1):
            rest = await continued.stream(http, COMPLETIONS, {**body, "continuation": {"token_ids": ids[:count]}})
            assert [token for event in rest for token in continued.ids_of(event)] == ids[count:]


async def test_refusals_name_the_parameter(unified):
    async with aiohttp.ClientSession(unified.url) as http:
        for param, fields in {
                "best_of": {"best_of": 3, "stream": True}, "suffix": {"suffix": "."}, "logprobs": {"logprobs": 6},
                "frequency_penalty": {"frequency_penalty": 3}, "logit_bias": {"logit_bias": {"x": 1}},
                "repetition_penalty": {"repetition_penalty": -1}}.items():
            async with http.post(COMPLETIONS, json={"prompt": PROMPT, **fields}) as answer:
                error = (await answer.json())["error"]
                assert answer.status == 400 and error["param"] == param and param in error["message"]
        fields = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "max_tokens": 1}
        async with http.post(COMPLETIONS, json={"prompt": PROMPT, **fields}) as answer:
            assert answer.status == 200
