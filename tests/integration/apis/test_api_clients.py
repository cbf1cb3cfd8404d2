"""The other APIs with their own clients, on one server and through the router and a pair."""

from __future__ import annotations

import io
import json
import time

import anthropic
import openai
import pytest

from baton.tests.helpers.harness import Cluster, post_json

QUESTION = "How do you spell banana?"


@pytest.fixture(params=["unified", "relay"])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def ai(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def clean(server):
    for worker in getattr(server, "workers", [server]):
        worker.assert_clean()


def test_responses(ai, server):
    chat = ai.chat.completions.create(model="tinychat", temperature=0, messages=[{"role": "user", "content": QUESTION}])
    answer = ai.responses.create(model="tinychat", temperature=0, input=QUESTION, store=False)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    with ai.responses.stream(model="tinychat", temperature=0, input=QUESTION) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == answer.output_text and len(pieces) > 1
    assert final.status == "completed" and final.usage.output_tokens == answer.usage.output_tokens
    cut = ai.responses.create(model="tinychat", input=QUESTION, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.usage.output_tokens == 2
    with pytest.raises(openai.NotFoundError):
        ai.responses.create(model="tinychat", input=QUESTION, previous_response_id="resp_1")
    clean(server)


def test_messages(claude, server):
    ask = {"model": "tinychat", "max_tokens": 50, "messages": [{"role": "user", "content": QUESTION}],
           "extra_body": {"temperature": 0}}
    answer = claude.messages.create(**ask)
    assert len(answer.content[0].text) > 5 and answer.stop_reason == "end_turn"
    with claude.messages.stream(**ask) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text == answer.content[0].text and len(pieces) > 1
    assert final.usage.output_tokens == answer.usage.output_tokens
    counted = claude.messages.count_tokens(model="tinychat", messages=ask["messages"])
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**ask | {"max_tokens": 20_000})
    clean(server)


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
          "required": ["city", "big"], "additionalProperties": False}


def test_answers_of_a_form(ai, claude, server):
    """Tools that must be called and schemas that must be met, in the words of each API.

    Greedy: drawn by chance, the tiny model's white space between two members may go on until the answer is cut.
    """
    tool = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    forced = {"type": "function", "name": "look"}
    for choice in ("required", forced):
        answer = ai.responses.create(model="tinychat", input=QUESTION, tools=[tool], tool_choice=choice,
                                     temperature=0, parallel_tool_calls=False)
        assert [item.type for item in answer.output] == ["function_call"]
        assert set(json.loads(answer.output[0].arguments)) == {"city", "big"}
    with ai.responses.stream(model="tinychat", input=QUESTION, tools=[tool], tool_choice=forced,
                             temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert set(json.loads("".join(pieces))) == {"city", "big"}
    formed = ai.responses.create(model="tinychat", input=QUESTION, temperature=0, text={
        "format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}})
    assert set(json.loads(formed.output_text)) == {"city", "big"}
    ask = {"model": "tinychat", "max_tokens": 100, "extra_body": {"temperature": 0},
           "messages": [{"role": "user", "content": QUESTION}], "tools": [{"name": "look", "input_schema": SCHEMA}]}
    for wanted in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
        message = claude.messages.create(**ask, tool_choice=wanted)
        assert message.stop_reason == "tool_use" and set(message.content[-1].input) == {"city", "big"}
        with claude.messages.stream(**ask, tool_choice=wanted) as events:
            final = events.get_final_message()
        assert final.stop_reason == "tool_use" and set(final.content[-1].input) == {"city", "big"}
    clean(server)


def test_tokens_and_models(ai, server):
    for prefix in ("", "/v1"):
        status, found = post_json(server.url + prefix + "/tokenize", {"prompt": QUESTION, "return_token_strs": True})
        assert status == 200 and found["count"] == len(found["tokens"]) == len(found["token_strs"])
        status, back = post_json(server.url + prefix + "/detokenize", {"tokens": found["tokens"]})
        assert status == 200 and back["text"] == back["prompt"] == QUESTION
    model = ai.models.retrieve("tinychat")
    assert model.id == "tinychat" and model.max_model_len == found["max_model_len"]
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("gpt-5")


def test_a_batch_through_a_router_survives_its_decode_server(tmp_path):
    """Lines have no pair: the decode server prefills them itself. It is killed in the middle, and started again."""
    cluster = Cluster(tmp_path)
    decode = cluster.decode[0]
    decode.argv += ["--file-storage-path", str(tmp_path / "kept"), "--batch-concurrency", "3"]
    count = 60
    lines = [json.dumps({"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": {
        "model": "tinychat", "temperature": 0, "max_tokens": 8,
        "messages": [{"role": "user", "content": f"What is {i % 9} plus {i % 7}?"}]}}) for i in range(count)]
    with cluster, openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as ai:
        file = ai.files.create(file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
        batch = ai.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        _wait(lambda: ai.batches.retrieve(batch.id).request_counts.completed >= 10)
        decode.kill()
        decode.start().wait_ready()
        _wait(lambda: _retrieve(ai, batch.id) == "completed")
        done = ai.batches.retrieve(batch.id)
        answers = [json.loads(line) for line in ai.files.content(done.output_file_id).text.splitlines()]
        assert [answer["custom_id"] for answer in answers] == [str(i) for i in range(count)]
        assert done.request_counts.completed == count and done.error_file_id is None
        generated = sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers)
        assert decode.state()["counters"]["generation_tokens"] < generated  # the first ones were not asked again
        clean(cluster)


def _retrieve(ai, batch_id):
    """None while the router has not yet found the worker healthy again."""
    try:
        return ai.batches.retrieve(batch_id).status
    except openai.APIError:
        return None


def _wait(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
