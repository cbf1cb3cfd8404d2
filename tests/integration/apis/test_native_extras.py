"""Logit processors, hidden states, prompts of embeddings and batches of /generate: a pair answers as one server."""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.common.config.checkpoint import resolve_checkpoint
from baton.common.config.server import ModelArgs
from baton.common.sampling.sglang_processors import CustomLogitProcessor
from baton.tests.helpers.harness import get_json, post_json
from baton.tests.integration.apis.test_sampling import GENERATE, NATIVE, PROMPT, ask, same

DISALLOWED = "baton.common.sampling.builtin_processors:DisallowedTokens"
BUDGET = "baton.common.sampling.builtin_processors:ThinkingBudget"
HERE = "baton.tests.helpers.row_processors"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(resolve_checkpoint(ModelArgs(model_path="tinychat")),
                                                dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def embeds(model):
    """A prompt of 40 rows that no tokens stand for."""
    torch.manual_seed(0)
    table = model.get_input_embeddings().weight
    return (table[torch.arange(100, 140)] + 0.02 * torch.randn(40, table.shape[1])).detach()


def stream(server, body, path=GENERATE):
    request = urllib.request.Request(server.url + path, json.dumps({**body, "stream": True}).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def clean(relay):
    for worker in relay.workers:
        worker.assert_clean()


# ---------------------------------------------------------------- processors


def test_a_processor_counts_from_the_first_token_on(unified, relay):
    """A pair's first token is made by prefill."""
    told = ask(unified, GENERATE, {"text": PROMPT, "sampling_params": NATIVE})["output_ids"]
    params = {**NATIVE, "custom_params": {"token_ids": told[:1]}}
    body = {"text": PROMPT, "sampling_params": params, "custom_logit_processor": DISALLOWED}
    answer = ask(unified, GENERATE, body)
    assert told[0] not in answer["output_ids"]
    same(answer, ask(relay, GENERATE, body))
    biased = {**NATIVE, "logit_bias": {str(told[0]): -100}}
    assert ask(unified, GENERATE, {"text": PROMPT, "sampling_params": biased})["output_ids"] == answer["output_ids"]


def test_processors_of_a_batch(unified, relay):
    body = {"text": [PROMPT, "Hello!", PROMPT], "return_logprob": True, "top_logprobs_num": 2, "sampling_params": [
        {**NATIVE, "custom_params": {"token_ids": [1, 2, 40]}}, NATIVE,
        {**NATIVE, "custom_params": {"thinking_budget": 3, "end_token_id": 77, "new_line_token_id": 78}}],
        "custom_logit_processor": [DISALLOWED, None, BUDGET]}
    answers = ask(unified, GENERATE, body)
    same(answers, ask(relay, GENERATE, body))
    assert answers[2]["output_ids"][3:5] == [78, 77]
    plain = ask(unified, GENERATE, {"text": "Hello!", "sampling_params": NATIVE})
    assert answers[1]["output_ids"] == plain["output_ids"]
    clean(relay)


@pytest.mark.parametrize("path,params,why", [
    ('{"callable": "no hex"}', {}, "hexadecimal"),
    ('{"callable": "8004"}', {}, "cannot be unpickled here: "),
    ("os.path", {}, "import path"),
    ("baton.nothing:Name", {}, "ModuleNotFoundError"),
    (f"{HERE}:NeedsArguments", {}, "TypeError"),
    (DISALLOWED, {}, "KeyError: 'token_ids'"),
    (DISALLOWED, {"token_ids": [10**9]}, "which the model does not have"),
    (f"{HERE}:fails_late", {"fails": True}, "RuntimeError: as asked"),
])
def test_a_processor_that_cannot_work_is_a_400(unified, relay, path, params, why):
    body = {"text": PROMPT, "sampling_params": {**NATIVE, "custom_params": params}, "custom_logit_processor": path}
    for server in (unified, relay):
        status, answer = post_json(server.url + GENERATE, body)
        assert status == 400 and why in answer["error"]["message"], (status, answer)
        ask(server, GENERATE, {"text": PROMPT, "sampling_params": NATIVE})
    clean(relay)


def always() -> type:
    """A class that dill pickles by value, because it is no module's."""
    class Always(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list):
            for row, params in enumerate(custom_param_list):
                logits[row] = -float("inf")
                logits[row, params["token_id"]] = 0.0
            return logits

    return Always


def test_a_processor_that_the_request_brings(unified, relay):
    """In all APIs, for batches and n; a pair's prefill samples the first token."""
    serialized = always().to_str()
    asks = {"custom_logit_processor": serialized, "max_tokens": 4, "n": 2, "ignore_eos": True}
    for server in (unified, relay):
        body = {"text": [PROMPT, "Hello!"], "custom_logit_processor": serialized, "sampling_params": [
            {**NATIVE, "max_new_tokens": 4, "n": 2, "custom_params": {"token_id": token}} for token in (70, 71)]}
        assert [answer["output_ids"] for answer in ask(server, GENERATE, body)] == [[70] * 4] * 2 + [[71] * 4] * 2
        text = ask(server, "/detokenize", {"tokens": [72] * 4})["text"]
        told = ask(server, "/v1/completions", {"prompt": ["a", "b"], **asks, "custom_params": {"token_id": 72},
                                               "custom_logit_processor": [serialized, serialized]})
        assert [choice["text"] for choice in told["choices"]] == [text] * 4
        told = ask(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], **asks,
                                                    "custom_params": {"token_id": 72}})
        assert [choice["message"]["content"] for choice in told["choices"]] == [text] * 2
    clean(relay)


# ---------------------------------------------------------------- hidden states


def test_hidden_states_in_openais_apis(unified, relay):
    """The newest state, which /generate has last."""
    native = ask(unified, GENERATE, {"text": PROMPT, "sampling_params": NATIVE, "return_hidden_states": True})
    asks = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_hidden_states": True}
    for server in (unified, relay):
        told = ask(server, "/v1/completions", {"prompt": PROMPT, **asks})
        np.testing.assert_allclose(told["choices"][0]["hidden_states"], native["meta_info"]["hidden_states"][-1],
                                   atol=2e-3)
        assert "hidden_states" not in ask(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"][0]
        for path, body in (("/v1/completions", {"prompt": ["a", PROMPT]}), ("/v1/chat/completions", {
                "messages": [{"role": "user", "content": "Hello!"}]})):
            whole = ask(server, path, {**body, **asks, "n": 2})["choices"]
            events = stream(server, {**body, **asks, "n": 2}, path)
            ends = [choice for event in events for choice in event["choices"]
                    if "hidden_states" in choice.get("delta", choice)]
            assert sorted(choice["index"] for choice in ends) == list(range(len(whole)))
            for choice in ends:
                assert choice["finish_reason"]
                np.testing.assert_allclose(choice.get("delta", choice)["hidden_states"],
                                           whole[choice["index"]]["hidden_states"], atol=2e-3)
    clean(relay)


def test_hidden_states_are_the_models_own(unified, relay, model):
    body = {"text": PROMPT, "sampling_params": NATIVE, "return_hidden_states": True}
    ids = ask(unified, "/tokenize", {"prompt": PROMPT})["tokens"]
    for server in (unified, relay):
        answer = ask(server, GENERATE, body)
        states = answer["meta_info"]["hidden_states"]
        assert [len(states), len(states[0])] == [8, len(ids)]  # one list of the prompt's, then one for each decode step
        found = np.array(states[0] + states[1:])
        with torch.no_grad():
            tokens = torch.tensor([ids + answer["output_ids"][:-1]])
            expected = model.model(tokens).last_hidden_state[0].numpy()
        np.testing.assert_allclose(found, expected, atol=2e-3)
    clean(relay)


def test_hidden_states_in_batches_and_streams(unified, relay):
    body = {"text": [PROMPT, "Hello!"], "sampling_params": {**NATIVE, "n": 2, "max_new_tokens": 3},
            "return_hidden_states": [True, False]}
    answers = ask(unified, GENERATE, body)
    same(answers, ask(relay, GENERATE, body))
    assert ["hidden_states" in answer["meta_info"] for answer in answers] == [True, True, False, False]
    for server in (unified, relay):
        events = stream(server, body)
        told = {event["index"]: event for event in events if "hidden_states" in event["meta_info"]}
        assert [event["index"] for event in events if "hidden_states" in event["meta_info"]] == sorted(told)
        assert told.keys() == {0, 1} and all(event["meta_info"]["finish_reason"] for event in told.values())
        for index, event in told.items():
            same(event["meta_info"]["hidden_states"], answers[index]["meta_info"]["hidden_states"])
    prompt_only = {"text": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_hidden_states": True}
    answer = ask(unified, GENERATE, prompt_only)
    same(answer, ask(relay, GENERATE, prompt_only))
    assert len(answer["meta_info"]["hidden_states"]) == 1


# ---------------------------------------------------------------- embeddings


def test_embeddings_are_answered_as_transformers_does(unified, relay, model, embeds):
    expected = model.generate(inputs_embeds=embeds[None], max_new_tokens=12, do_sample=False,
                              eos_token_id=None)[0].tolist()
    body = {"input_embeds": embeds.tolist(), "sampling_params": {**NATIVE, "max_new_tokens": 12},
            "return_logprob": True}
    for server in (unified, relay):
        cached = [worker.pages()["cached"] for worker in (relay.workers if server is relay else [server])]
        for _ in range(2):
            answer = ask(server, GENERATE, body)
            assert answer["output_ids"] == expected
            assert (answer["meta_info"]["prompt_tokens"], answer["meta_info"]["cached_tokens"]) == (40, 0)
        assert cached == [worker.pages()["cached"] for worker in (relay.workers if server is relay else [server])]
    clean(relay)


def test_embeddings_in_batches_and_streams(unified, relay, embeds):
    rows = embeds.tolist()
    body = {"input_embeds": [rows, rows[:7]], "sampling_params": [{**NATIVE, "n": 2}, {**NATIVE, "n": 2}],
            "rid": ["embeds-a", "embeds-b"], "return_hidden_states": [False, True]}
    answers = ask(unified, GENERATE, body)
    same([{**answer, "meta_info": {**answer["meta_info"], "id": ""}} for answer in answers],
         [{**answer, "meta_info": {**answer["meta_info"], "id": ""}} for answer in ask(relay, GENERATE, body)])
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [40, 40, 7, 7]
    for server in (unified, relay):
        last = {event["index"]: event for event in stream(server, body)}
        assert [last[i]["output_ids"] for i in range(4)] == [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("change,why", [
    ({"input_embeds": [[0.5, 1.0]]}, "hidden size"), ({"input_embeds": []}, "at least one row"),
    ({"input_embeds": [["a"]]}, "expected"), ({"text": "a"}, "Give either"),
    ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    ({"session_params": {"id": "x"}}, "session_params"),
])
def test_embeddings_that_cannot_be_used_are_refused(unified, relay, embeds, change, why):
    body = {"input_embeds": embeds.tolist(), "sampling_params": NATIVE, **change}
    for server in (unified, relay):
        status, answer = post_json(server.url + GENERATE, body)
        assert status == 400 and why in answer["error"]["message"], (status, answer)


# ---------------------------------------------------------------- batches


BATCH = {
    "text": [PROMPT, "Hello!"], "rid": ["batch-a", "batch-b"], "return_logprob": [True, False],
    "logprob_start_len": [2, -1], "top_logprobs_num": [2, 0], "token_ids_logprob": [[5, 6], None],
    "return_text_in_logprobs": True, "return_hidden_states": [False, True],
    "custom_logit_processor": [None, DISALLOWED],
    "sampling_params": [{**NATIVE, "n": 2, "temperature": 1.8, "seed": 5},
                        {**NATIVE, "n": 2, "max_new_tokens": 4, "custom_params": {"token_ids": [9]}}],
}


def test_every_field_of_a_batch_as_a_list(unified, relay):
    answers = ask(unified, GENERATE, BATCH)
    same(answers, ask(relay, GENERATE, BATCH))
    assert [answer["meta_info"]["id"] for answer in answers] == ["batch-a-0", "batch-a-1", "batch-b-0", "batch-b-1"]
    first, second, third, _ = (answer["meta_info"] for answer in answers)
    assert answers[0]["output_ids"] != answers[1]["output_ids"]  # consecutive seeds
    value, token, text = first["input_token_logprobs"][0]
    assert isinstance(value, float) and isinstance(token, int) and isinstance(text, str)
    assert len(first["input_token_logprobs"]) == first["prompt_tokens"] - 2
    assert [len(one) for one in first["output_top_logprobs"]] == [2] * 8
    assert [[token for _, token, _ in one] for one in second["output_token_ids_logprobs"]] == [[5, 6]] * 8
    assert "hidden_states" not in first and len(third["hidden_states"]) == 4
    assert "output_token_logprobs" not in third and third["completion_tokens"] == 4


def test_a_streamed_batch_tells_each_answer_under_its_index(unified, relay):
    answers = ask(unified, GENERATE, BATCH)
    for server in (unified, relay):
        last = {}
        for event in stream(server, BATCH):
            before = last.get(event["index"], {"text": "", "output_ids": []})
            assert event["text"].startswith(before["text"]), "each event tells all of the answer so far"
            assert event["output_ids"][:len(before["output_ids"])] == before["output_ids"]
            last[event["index"]] = event
        told = [{name: value for name, value in last[i].items() if name != "index"} for i in sorted(last)]
        same(answers, told)


@pytest.mark.parametrize("name,value", [
    ("rid", ["a"]), ("return_logprob", [True]), ("logprob_start_len", [1, 2, 3]), ("top_logprobs_num", [1]),
    ("token_ids_logprob", [[1]]), ("return_hidden_states", [True]), ("custom_logit_processor", [None]),
    ("sampling_params", [NATIVE]), ("sampling_params", [{"n": 1}, {"n": 2}]),
])
def test_lists_of_another_length_are_refused(unified, name, value):
    status, answer = post_json(unified.url + GENERATE, {"text": ["a", "b"], name: value})
    assert status == 400 and name in answer["error"]["message"]


@pytest.mark.slow  # tests/common has a tracker's part of it, and output_limit's
def test_a_prompt_that_fills_the_context_is_scored(unified, relay):
    """Nothing follows it, so that it needs no room for output."""
    length = get_json(unified.url + "/v1/models")["data"][0]["max_model_len"]
    ids = [100 + i % 50 for i in range(length)]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
            "logprob_start_len": length - 3}
    answer = ask(unified, GENERATE, body)
    assert [token for _, token, _ in answer["meta_info"]["input_token_logprobs"]] == ids[-3:]
    assert answer["output_ids"] == []
    same(answer, ask(relay, GENERATE, body))
    for more in ({"input_ids": [*ids, 1]}, {"sampling_params": {"max_new_tokens": 1}}):
        assert post_json(unified.url + GENERATE, {**body, **more})[0] == 400
    clean(relay)
