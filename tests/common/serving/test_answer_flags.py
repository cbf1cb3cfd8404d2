"""What servers tell and take only where their flags say so, and what is refused with a way out."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import AnswerArgs, ModelArgs, ObserveArgs
from baton.common.serving.chat.prompt import chat_prompt
from baton.common.serving.chat.schema import decode_chat
from baton.common.serving.chat.tool_choice import tool_choice
from baton.common.serving.completions.fill_in_the_middle import with_suffix
from baton.common.serving.completions.schema import CompletionRequest, decode_completion
from baton.common.serving.context.served_model import ServedModel
from baton.common.serving.native.schema import preferred_sampling
from baton.common.serving.protocol.prompts import Prompts
from baton.common.serving.protocol.sampling import sampling_params
from baton.tests.helpers.serving import Server
from baton.tests.helpers.small_models import server_config

CHAT = {"messages": [{"role": "user", "content": "hello world"}]}


@pytest.mark.parametrize("name,value", [
    ("custom_logit_processor", "module:Name"), ("custom_logit_processor", ["module:Name"]),
    ("return_hidden_states", True), ("return_hidden_states", [True]),
])
async def test_generate_names_the_flag_that_is_missing(http: aiohttp.ClientSession, name: str, value: Any) -> None:
    async with http.post("/generate", json={"text": ["hello"], name: value}) as answer:
        error = (await answer.json())["error"]
    assert answer.status == 400 and error["param"] == name and f"--enable-{name.replace('_', '-')}" in error["message"]
    harmless = [None] if isinstance(value, list) else None
    async with http.post("/generate", json={"text": ["hello"], name: harmless and [False]
                                            if name.startswith("return") else harmless}) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("path,body", [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("name,value,instead", [
    ("prompt_logprobs", 0, "echo and logprobs"), ("prompt_logprobs", 5, "logprob_start_len"),
    ("return_hidden_states", True, "--enable-return-hidden-states"),
    ("custom_logit_processor", "a:b", "--enable-custom-logit-processor"),
])
async def test_what_other_endpoints_offer_is_named(http: aiohttp.ClientSession, path: str, body: dict[str, Any],
                                                   name: str, value: Any, instead: str) -> None:
    async with http.post(path, json={**body, name: value}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, name) and instead in error["message"]
    async with http.post(path, json={**body, name: None}) as answer:
        assert answer.status == 200


@pytest.fixture(scope="module")
def silent(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("silent") / "log", "--model-path", str(checkpoint),
                    "--no-enable-cache-report", "--weight-version", "v7", "--stream-output",
                    "--completion-template", "qwen_coder", "--log-level-http", "info", "--show-time-cost",
                    "--collect-tokens-histogram",
                    "--bucket-time-to-first-token", "2", "0.5", "--bucket-e2e-request-latency", "1",
                    "--prompt-tokens-buckets", "customer", "4", "2", "--generation-tokens-buckets", "tse", "8", "2",
                    "4", "--stream-response-default-include-usage",
                    "--preferred-sampling-params", '{"max_new_tokens": 2, "stop": "x"}')
    try:
        yield server.wait_ready()
    finally:
        server.kill()


async def test_usage_without_cached_tokens(silent: Server, http: aiohttp.ClientSession) -> None:
    """The fake engine says that one token of each prompt was cached."""
    anthropic = {"max_tokens": 9, "model": "tiny", **CHAT}
    told: dict[bool, list[dict[str, Any]]] = {}
    async with aiohttp.ClientSession(silent.url) as without:
        for session in (http, without):
            usages = told.setdefault(session is http, [])
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello world"}),
                               ("/v1/responses", {"input": "hello world"}), ("/v1/messages", anthropic)):
                async with session.post(path, json=body) as answer:
                    usages.append((await answer.json())["usage"])
            streamed = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
            async with session.post("/v1/chat/completions", json=streamed) as answer:
                assert ('"prompt_tokens_details"' in await answer.text()) is (session is http)
    for usage, key in zip(told[True], ("prompt_tokens_details", "prompt_tokens_details", "input_tokens_details")):
        assert usage[key]["cached_tokens"] == 1
    chat, completion, response, message = told[False]
    assert "prompt_tokens_details" not in chat and "prompt_tokens_details" not in completion
    assert "input_tokens_details" not in response
    assert message["cache_read_input_tokens"] == 0
    assert message["input_tokens"] == told[True][3]["input_tokens"] + 1


async def test_streams_end_with_their_usage_by_default(silent: Server) -> None:
    async with aiohttp.ClientSession(silent.url) as session:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello world"})):
            for options, reported in ((None, True), ({"continuous_usage_stats": False}, True),
                                      ({"include_usage": False}, False)):
                asked = {**body, "stream": True, "max_tokens": 2, "stream_options": options}
                async with session.post(path, json=asked) as answer:
                    assert ('"total_tokens"' in await answer.text()) is reported, (path, options)
            async with session.post(path, json={**body, "max_tokens": 2}) as answer:
                assert answer.status == 200


def test_sampling_as_the_checkpoint_recommends(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None, "repetition_penalty": "1", "eos_token_id": 3}))
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    for value, expected in (("model", recommended), ("openai", {})):
        config = dataclasses.replace(server_config(tmp_path), answers=AnswerArgs(sampling_defaults=value))
        assert ServedModel(config, cast(Any, None)).sampling_defaults == expected
    body = decode_completion(b'{"prompt": "a", "top_p": 0.5}')
    params = sampling_params(body, 4, 4, vocab_size=100, defaults=recommended)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 20)
    assert sampling_params(decode_completion(b'{"prompt": "a"}'), 4, 4, vocab_size=100, defaults={}).temperature == 1


def test_template_variables_of_the_server() -> None:
    args = AnswerArgs(default_chat_template_kwargs='{"enable_thinking": false, "name": "x"}')
    thinks = {"enable_thinking": True, "name": "x"}
    for given, expected in (({}, {"enable_thinking": False, "name": "x"}),
                            ({"chat_template_kwargs": {"enable_thinking": True}}, thinks),
                            ({"reasoning": {"enabled": True}}, {**thinks, "thinking": True})):
        seen: dict[str, Any] = {}
        tokenizer = SimpleNamespace(chat_template="", render_chat=lambda messages, seen=seen, **more: seen.update(more))
        chat = decode_chat(json.dumps({**CHAT, **given}).encode())
        chat_prompt(cast(Any, tokenizer), chat, tool_choice(chat), args)
        assert seen["options"] == expected
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs must be a JSON object"):
        AnswerArgs(default_chat_template_kwargs="[1]")


async def events(session: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with session.post("/generate", json={**body, "stream": True}) as answer:
        lines = (await answer.text()).split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]


async def test_streams_of_disjoint_segments(silent: Server, http: aiohttp.ClientSession) -> None:
    body = {"text": "hello world", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
            "return_logprob": True}
    async with aiohttp.ClientSession(silent.url) as session:
        segments = await events(session, body)
        async with session.post("/generate", json=body) as answer:
            whole = await answer.json()
    sofar = await events(http, body)
    assert len(segments) > 1 and "".join(event["text"] for event in segments) == sofar[-1]["text"] == whole["text"]
    assert [token for event in segments for token in event["output_ids"]] == whole["output_ids"]
    assert [event["output_ids"] for event in segments] != [event["output_ids"] for event in sofar]
    assert sum((event["meta_info"]["output_token_logprobs"] for event in segments), []) == whole[
        "meta_info"]["output_token_logprobs"]
    assert segments[-1]["meta_info"]["completion_tokens"] == 4


async def test_preferred_sampling_parameters_and_the_weights_version(silent: Server,
                                                                     http: aiohttp.ClientSession) -> None:
    async with aiohttp.ClientSession(silent.url) as session:
        for sampling, count in ((None, 2), ({"ignore_eos": True}, 2), ({"max_new_tokens": 3, "ignore_eos": True}, 3)):
            async with session.post("/generate", json={"text": "hello world", "sampling_params": sampling}) as answer:
                info = (await answer.json())["meta_info"]
            assert (info["completion_tokens"], info["weight_version"]) == (count, "v7")
        async with session.get("/get_weight_version") as answer:
            assert await answer.json() == {"weight_version": "v7"}
        async with session.get("/get_model_info") as answer:
            found = await answer.json()
    assert found["weight_version"] == "v7"
    assert json.loads(found["preferred_sampling_params"]) == {"max_new_tokens": 2, "stop": "x"}
    async with http.get("/get_weight_version") as answer:
        assert await answer.json() == {"weight_version": "default"}


@pytest.mark.parametrize("text, sentence", [
    ('{"n": 2}', "has n, which no server sets"), ('{"temperatur": 0}', "has temperatur"),
    ('{"temperature": "hot"}', "--preferred-sampling-params: Expected"), ("[]", "must be a JSON object, not"),
    ("{", "must be a JSON object: ")])
def test_preferred_sampling_parameters_that_cannot_be(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        preferred_sampling(text)


async def test_a_suffix_is_filled_in_by_the_server_s_template(silent: Server, http: aiohttp.ClientSession) -> None:
    async with aiohttp.ClientSession(silent.url) as session:
        counts = []
        for fields in ({}, {"suffix": ""}, {"suffix": " world"}):
            async with session.post("/v1/completions", json={"prompt": "hello", **fields}) as answer:
                counts.append((await answer.json())["usage"]["prompt_tokens"])
        assert counts[0] == counts[1] < counts[2]
        for fields, part in (({"prompt": [50]}, "not token ids"), ({"echo": True}, "echo")):
            async with session.post("/v1/completions", json={"prompt": "hello", "suffix": "x", **fields}) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (400, "suffix") and part in error["message"]
    async with http.post("/v1/completions", json={"prompt": "hello", "suffix": "x"}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, "suffix") and "--completion-template" in error["message"]


@pytest.mark.parametrize("template, written", [
    ("qwen_coder", "<|fim_prefix|>def {<|fim_suffix|>}<|fim_middle|>"),
    ("star_coder", "<fim_prefix>def {<fim_suffix>}<fim_middle>"),
    ("deepseek_coder", "<｜fim▁begin｜>def {<｜fim▁hole｜>}<｜fim▁end｜>")])
def test_templates_of_code_models(template: str, written: str) -> None:
    body = CompletionRequest(prompt="def {", suffix="}")
    assert with_suffix(body, Prompts(texts=["def {"]), template) == Prompts(texts=[written])
    assert template in typing.get_args(typing.get_type_hints(ModelArgs)["completion_template"])[0].__args__


async def test_histograms_and_the_http_log(silent: Server) -> None:
    async with aiohttp.ClientSession(silent.url) as session:
        async with session.post("/generate", json={"text": "hello world"}) as answer:
            assert answer.status == 200
        async with session.get("/metrics") as answer:
            text = await answer.text()
    bounds = {name: re.findall(rf'^sglang:{name}_bucket{{.*le="([^"]+)"', text, re.MULTILINE) for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "prompt_tokens_histogram",
        "generation_tokens_histogram")}
    assert bounds == {"time_to_first_token_seconds": ["0.5", "2.0", "+Inf"],
                      "e2e_request_latency_seconds": ["1.0", "+Inf"],
                      "prompt_tokens_histogram": ["2.0", "4.0", "+Inf"],
                      "generation_tokens_histogram": ["4.0", "6.0", "8.0", "10.0", "12.0", "+Inf"]}
    count = re.search(r"^sglang:prompt_tokens_histogram_count{.*} (.+)$", text, re.MULTILINE)
    assert count is not None and float(count[1]) >= 1
    log = silent.log.read_text()
    assert re.search(r"starting: .+ took \d+\.\d\d s", log)
    assert '"POST /generate HTTP/1.1" 200 in ' in log


@pytest.mark.parametrize("flags, sentence", [
    ({"prompt_tokens_buckets": ("tse", "8", "1", "4")}, "--prompt-tokens-buckets takes default, custom BOUND"),
    ({"generation_tokens_buckets": ("custom",)}, "--generation-tokens-buckets takes default"),
    ({"generation_tokens_buckets": ("custom", "few")}, "not custom few"),
    ({"prompt_tokens_buckets": ("default", "8")}, "not default 8"),
    ({"bucket_inter_token_latency": (1.0, 0.0)}, "--bucket-inter-token-latency must be above 0, not 0")])
def test_buckets_that_cannot_be(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ObserveArgs(**flags)


@pytest.fixture(scope="module")
def without_texts(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Server]:
    """A server of a checkpoint that has no tokenizer at all."""
    folder = tmp_path_factory.mktemp("no_tokenizer")
    for file in checkpoint.iterdir():
        if "token" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    server = Server(folder / "log", "--model-path", str(folder), "--skip-tokenizer-init")
    try:
        yield server.wait_ready()
    finally:
        server.kill()


async def test_a_server_without_a_tokenizer_takes_ids(without_texts: Server, http: aiohttp.ClientSession) -> None:
    body = {"input_ids": [50, 51], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
            "return_logprob": True}
    async with http.post("/generate", json=body) as answer:
        expected = await answer.json()
    async with aiohttp.ClientSession(without_texts.url) as session:
        async with session.post("/generate", json=body) as answer:
            found = await answer.json()
        assert found["output_ids"] == expected["output_ids"] and found["text"] == "" != expected["text"]
        assert found["meta_info"]["output_token_logprobs"] == expected["meta_info"]["output_token_logprobs"]
        assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
        for event in await events(session, body):
            assert event["text"] == ""
        async with session.post("/v1/completions", json={"prompt": [50, 51], "max_tokens": 3}) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("path,body,part", [
    ("/generate", {"text": "hello"}, "send token ids"), ("/v1/completions", {"prompt": "hello"}, "send token ids"),
    ("/v1/chat/completions", CHAT, "no chat template"), ("/tokenize", {"prompt": "hello"}, "send token ids"),
    ("/generate", {"input_ids": [50], "sampling_params": {"stop": "x"}}, "send stop_token_ids"),
    ("/generate", {"input_ids": [50], "sampling_params": {"stop_regex": "x"}}, "send stop_token_ids"),
    ("/generate", {"input_ids": [50], "sampling_params": {"regex": "a+"}},
     "it cannot constrain texts, leave regex out"),
    ("/generate", {"input_ids": [5000000]}, "vocabulary"),
])
async def test_texts_are_refused_without_a_tokenizer(without_texts: Server, path: str, body: dict[str, Any],
                                                     part: str) -> None:
    async with aiohttp.ClientSession(without_texts.url) as session, session.post(path, json=body) as answer:
        error = (await answer.json())["error"]
    assert answer.status == 400 and part in error["message"]
