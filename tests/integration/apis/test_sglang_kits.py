"""What SGLang's client-side tests ask of a server: the same calls with the same assertions, of one server and of a pair
behind a router. Where a test depends on what a model says, tinychat's own words take the place of the test's.

Abort and pause: transfer/test_abort_and_pause.py. JSON schemas: test_structured.py. Images and LoRA are not served.
"""

from __future__ import annotations

import itertools
import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from baton.tests.helpers.harness import Cluster, Server, get_json, post_json

QUESTION = "What is the capital of France?"
PROMPT = "The capital of France is"
ASSISTANT = [{"role": "system", "content": "You are a helpful AI assistant"}, {"role": "user", "content": QUESTION}]


@pytest.fixture(params=["unified", "relay"])
def server(request: pytest.FixtureRequest) -> Server | Cluster:
    found: Server | Cluster = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(server: Server | Cluster) -> openai.Client:
    return openai.Client(api_key="EMPTY", base_url=f"{server.url}/v1", max_retries=0)


def ask(server: Any, path: str, body: dict[str, Any]) -> Any:
    status, answer = post_json(server.url + path, body)
    assert status == 200, answer
    return answer


# ---------------------------------------------------------------- api contract


def test_contract_of_the_server(server, client):
    for path in ("/health", "/health_generate"):
        with urllib.request.urlopen(server.url + path, timeout=60) as answer:
            assert answer.status == 200
    assert get_json(server.url + "/get_model_info")["model_path"]
    for path in ("/get_server_info", "/server_info"):
        assert get_json(server.url + path)["model_path"]
    models = list(client.models.list())
    assert len(models) == 1 and isinstance(models[0].max_model_len, int)
    found = client.models.retrieve(models[0].id)
    assert (found.id, found.root) == (models[0].id, models[0].id)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("non-existent-model")


def test_errors_of_a_wrong_length(client, server):
    """In words that clients look for; a stream fails before it begins."""
    long = [{"role": "user", "content": "hello " * 5000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="is longer than the model's context length"):
            client.chat.completions.create(model="default", messages=long, stream=stream)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(model="default", messages=ASSISTANT, max_tokens=10**6)
    for ids in ([-1], [2_000_000_000], [[0], [1, 2]]):
        status, told = post_json(server.url + "/generate", {
            "text": "hi", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "token_ids_logprob": ids})
        assert status == 400 and told["object"] == "error" and told["code"] == 400, told
    status, told = post_json(server.url + "/v1/score", {
        "query": "a", "items": ["b"], "label_token_ids": [999_999]})
    assert status == 400 and told["type"] == "BadRequestError" and "999999" in told["message"]


# ---------------------------------------------------------------- completions


MATRIX = list(itertools.product((False, True), (None, 5), (True, False), (1, 2), (False, True)))


def matrix(client: openai.Client, server: Any, run: Any) -> None:
    """Runs all combinations of echo, logprobs, a list of prompts, n, and token ids in place of texts."""
    ids = ask(server, "/tokenize", {"prompt": PROMPT})["tokens"]

    def one(case: tuple[bool, int | None, bool, int, bool]) -> None:
        echo, logprobs, batch, n, tokens = case
        given = ids if tokens else PROMPT
        run(client, len(ids), {"model": "default", "prompt": [given, given] if batch else given, "temperature": 0,
                               "max_tokens": 6, "echo": echo, "logprobs": logprobs, "n": n}, n * (1 + batch))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, MATRIX))


def test_completions(client, server):
    def run(client: openai.Client, num_ids: int, body: dict[str, Any], num_choices: int) -> None:
        told = client.completions.create(**body)
        assert len(told.choices) == num_choices and told.id and told.created
        if body["echo"]:
            assert told.choices[0].text.startswith(PROMPT)
        if body["logprobs"]:
            found = told.choices[0].logprobs
            assert isinstance(found.tokens[0], str) and isinstance(found.top_logprobs[1], dict)
            assert found.top_logprobs[1] and (body["echo"] or found.token_logprobs[0])
        assert told.usage.prompt_tokens == num_ids * num_choices // body["n"]
        assert told.usage.completion_tokens > 0 and told.usage.total_tokens > 0

    matrix(client, server, run)


def test_streams_of_completions(client, server):
    def run(client: openai.Client, num_ids: int, body: dict[str, Any], num_choices: int) -> None:
        seen: set[int] = set()
        usages = 0
        for event in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
            assert event.id and event.created
            if event.usage is not None:
                usages += 1
                assert min(event.usage.prompt_tokens, event.usage.completion_tokens, event.usage.total_tokens) > 0
                continue
            choice = event.choices[0]
            if body["logprobs"]:
                assert isinstance(choice.logprobs.tokens[0], str)
                if choice.index in seen or not body["echo"]:
                    assert choice.logprobs.top_logprobs[0]
            if body["echo"] and choice.index not in seen:
                assert choice.text.startswith(PROMPT)
            seen.add(choice.index)
        assert seen == set(range(num_choices)) and usages == 1

    matrix(client, server, run)


# ---------------------------------------------------------------- chats


@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize("n", [1, 2])
def test_chats(client, logprobs, n):
    asks = {"model": "default", "messages": ASSISTANT, "temperature": 0, "max_tokens": 12, "n": n,
            "logprobs": bool(logprobs), "top_logprobs": logprobs}
    told = client.chat.completions.create(**asks)
    assert len(told.choices) == n and told.id and told.created
    assert told.choices[0].message.role == "assistant" and isinstance(told.choices[0].message.content, str)
    assert min(told.usage.prompt_tokens, told.usage.completion_tokens, told.usage.total_tokens) > 0
    if logprobs:
        top = told.choices[0].logprobs.content[0].top_logprobs
        assert isinstance(top[0].token, str) and len(top) == logprobs
    ends: dict[int, int] = {}
    seen: set[int] = set()
    for event in client.chat.completions.create(**asks, stream=True, stream_options={"include_usage": True}):
        assert event.id and event.created
        if event.usage is not None:
            continue
        choice = event.choices[0]
        if choice.finish_reason is not None:
            ends[choice.index] = ends.get(choice.index, 0) + 1
        if choice.index not in seen:
            seen.add(choice.index)
            assert choice.delta.role == "assistant"
        elif choice.index not in ends:
            assert isinstance(choice.delta.content, str)
            if logprobs:
                assert len(choice.logprobs.content[0].top_logprobs) == logprobs
    assert ends == dict.fromkeys(range(n), 1) and seen == set(range(n))


def test_a_final_message_goes_on(client):
    for fields, last in (({"continue_final_message": True}, {}), ({}, {"prefix": True})):
        begun = {"role": "assistant", "content": "The capital of France is", **last}
        told = client.chat.completions.create(model="default", temperature=0, max_tokens=12, extra_body=fields,
                                              messages=[*ASSISTANT, begun])
        assert "Paris" in told.choices[0].message.content and "The capital" not in told.choices[0].message.content


# ---------------------------------------------------------------- why answers end


def test_matched_stops(server):
    """By a string, an expression, the end of the answer, its length."""
    def run(**fields: Any) -> tuple[Any, Any]:
        found = []
        for path, body in (("/v1/chat/completions", {"messages": ASSISTANT}),
                           ("/v1/completions", {"prompt": "Once upon a time there was"})):
            told = ask(server, path, {"model": "default", "temperature": 0, "top_p": 1, **body, **fields})["choices"][0]
            found.append((told["finish_reason"], told["matched_stop"]))
        return found[0], found[1]

    assert run(max_tokens=100, stop="a") == (("stop", "a"),) * 2
    assert run(max_tokens=100, stop_regex="a|e") == (("stop", "a|e"),) * 2
    assert run(max_tokens=1) == (("length", None),) * 2
    chat, _ = run(max_tokens=100, stop_regex=r"[s.!?]\s*$")
    assert chat == ("stop", r"[s.!?]\s*$")
    (reason, matched), _ = run(max_tokens=100)
    assert reason == "stop" and isinstance(matched, int)
    told = ask(server, "/generate", {"text": "Once upon a time there was", "sampling_params": {
        "temperature": 0, "max_new_tokens": 100, "stop": "a"}})
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": "a"}


# ---------------------------------------------------------------- grammars


GRAMMARS = (
    ("ebnf", 'root ::= "Hello" | "Hi" | "Hey"', "Hello|Hi|Hey"),
    ("ebnf", 'root ::= "(" area ")" " " area "-" line\narea ::= [0-9] [0-9] [0-9]\n'
             "line ::= [0-9] [0-9] [0-9] [0-9]", r"\(\d{3}\) \d{3}-\d{4}"),
    ("ebnf", 'root ::= "{" pair? "}"\npair ::= "\\"theme\\"" ":" ("\\"light\\"" | "\\"dark\\"")',
     r'\{("theme":"(light|dark)")?\}'),
    ("regex", r"^2024-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$", r"2024-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"),
)


def test_grammars(server, client):
    """Of three choices each, all at once; the last parameters ask for nothing."""
    def one(case: tuple[str, str, str]) -> None:
        kind, grammar, pattern = case
        sampling = {"temperature": 0.5, "max_new_tokens": 64, "n": 3, kind: grammar}
        told = ask(server, "/generate", {
            "text": "Generate one:", "sampling_params": sampling,
            "stream": False, "return_logprob": False, "top_logprobs_num": 0, "logprob_start_len": 0})
        assert isinstance(told, list) and len(told) == 3
        assert all(re.fullmatch(pattern, answer["text"].strip()) for answer in told), (pattern, told)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, GRAMMARS))
    regex = r'\{\n   "name": "[\w]{1,8}",\n   "population": [\d]{1,5}\n\}'
    told = client.chat.completions.create(model="default", messages=ASSISTANT, max_tokens=99, temperature=0,
                                          extra_body={"regex": regex})
    assert isinstance(json.loads(told.choices[0].message.content)["population"], int)


# ---------------------------------------------------------------- anthropic


def test_messages(server):
    claude = anthropic.Anthropic(base_url=server.url, auth_token="EMPTY", max_retries=0)
    asks: dict[str, Any] = {"model": "default", "max_tokens": 16}
    question: Any = {"role": "user", "content": QUESTION}
    for fields in ({"messages": [question]}, {"messages": [question], "system": "Be brief."},
                   {"messages": [question], "system": [{"type": "text", "text": "Be"},
                                                       {"type": "text", "text": "brief."}]},
                   {"messages": [question, {"role": "assistant", "content": "Paris."}, question]},
                   {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]},
                   {"messages": [question, {"role": "system", "content": "Be brief."}, question]},
                   {"messages": [question], "extra_body": {"temperature": 0.0, "top_p": 0.9, "top_k": 40}},
                   {"messages": [question], "extra_headers": {"anthropic-beta": "x"}, "extra_body": {"betas": ["x"]}}):
        told = claude.messages.create(**asks, **fields)
        assert (told.type, told.role, told.content[0].type) == ("message", "assistant", "text")
        assert told.id.startswith("msg_") and told.content[0].text and told.model
        assert told.usage.input_tokens > 0 and told.usage.output_tokens > 0
        assert told.stop_reason in ("end_turn", "max_tokens", "stop_sequence")
    assert claude.messages.create(**asks | {"max_tokens": 1}, messages=[question]).stop_reason == "max_tokens"
    told = claude.messages.create(**asks, messages=[question], stop_sequences=["a"], extra_body={"temperature": 0})
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "a")
    counts = [claude.messages.count_tokens(model="default", messages=[question], **fields).input_tokens
              for fields in ({}, {"system": "Be brief."})]
    assert 0 < counts[0] < counts[1]
    for wrong in ({"max_tokens": -1, "messages": [question]}, {"max_tokens": 9, "messages": []}):
        assert post_json(server.url + "/v1/messages", {"model": "default", **wrong})[0] == 400
    with claude.messages.stream(**asks, messages=[question]) as stream:
        kinds = [event.type for event in stream]
        text = stream.get_final_text()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and text
    assert kinds.index("content_block_start") < kinds.index("content_block_delta") < kinds.index("content_block_stop")
    assert "message_delta" in kinds
