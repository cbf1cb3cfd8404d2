"""Backends over HTTP, against a server that answers from a script."""

from __future__ import annotations

import builtins
import json
import sys
import types
from typing import Any

import pytest

import baton.lang as sgl
from baton.lang.backends.base import Prompt
from baton.lang.backends.openai import HTTPTransport
from baton.lang.chat_template import TEMPLATES, ChatTemplate, learn_template, template_of_model
from baton.lang.sampling import SamplingParams
from baton.tests.helpers.stub_http import stub_server


def native(body: Any) -> Any:
    """``/generate`` whose tokens are letters; logprob of one: minus its place in the alphabet, half of it after "x"."""
    if body.get("stream"):
        return ({"text": "abc"[:end], "meta_info": {"end": end}} for end in range(1, 4))
    if "input_ids" in body:
        texts = ["".join(map(chr, ids)) for ids in body["input_ids"]]
    else:
        texts = body["text"] if isinstance(body["text"], list) else [body["text"]]
    start = body.get("logprob_start_len", 0)
    answers = []
    for text in texts:
        scale = 0.5 if text.startswith("x") else 1.0
        logprobs = [[None if at == 0 else -scale * (ord(letter) - 96), ord(letter), letter]
                    for at, letter in enumerate(text)][start:]
        answers.append({"text": "made", "meta_info": {"prompt_tokens": len(text), "input_token_logprobs": logprobs}})
    return answers if len(answers) > 1 or isinstance(body.get("text"), list) else answers[0]


INFO = {"/get_model_info": lambda _: {"model_path": "some/Qwen2-7B-Instruct"}}


@pytest.fixture
def server():
    with stub_server({**INFO, "/generate": native, "/flush_cache": lambda _: "Cache flushed.",
                      "/get_server_info": lambda _: {"version": "1"}}) as stub:
        yield stub


def ask(expression: Any, backend: Any, **params: Any) -> Any:
    def program(s):
        s += "xq" + expression

    return sgl.function(program).run(backend=backend, **params)


def test_bodies_of_generate(server):
    endpoint = sgl.RuntimeEndpoint(server.url, api_key="secret")
    state = ask(sgl.gen("a", 9, 2, stop="\n", top_k=4, return_logprob=True, top_logprobs_num=2), endpoint, min_p=0.1)
    assert state["a"] == "made" and state.get_meta_info("a")["prompt_tokens"] == 2
    assert server.bodies("/generate") == [
        {"text": "xq", "return_logprob": True, "top_logprobs_num": 2,
         "sampling_params": {"max_new_tokens": 9, "min_new_tokens": 2, "stop": "\n", "top_k": 4, "min_p": 0.1}}]
    assert server.headers[-1]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("expression, sent", [
    (sgl.gen_int("a"), {"regex": r"[-+]?[0-9]+[ \n]*", "stop": [" ", "\n"]}),
    (sgl.gen("a", dtype=float, stop="x"), {"regex": r"[-+]?[0-9]*\.?[0-9]+[ \n]*", "stop": ["x", " ", "\n"]}),
    (sgl.gen("a", dtype="bool"), {"regex": "(True|False)"}),
    (sgl.gen_string("a"), {"regex": r'"[\w\d\s]*"'}),
    (sgl.gen("a", json_schema={"type": "object"}), {"json_schema": '{"type": "object"}'}),
    (sgl.gen("a", json_schema='{"type": "array"}'), {"json_schema": '{"type": "array"}'}),
])
def test_constraints(server, expression, sent):
    ask(expression, sgl.RuntimeEndpoint(server.url)).sync()
    assert server.bodies("/generate")[0]["sampling_params"] == {"max_new_tokens": 128, **sent}


@pytest.mark.parametrize("wrong, message", [(sgl.gen("a", dtype=list), "dtype list is not known"),
                                            (sgl.gen("a", dtype=int, regex="1"), "exclude each other")])
def test_wrong_constraints(server, wrong, message):
    assert message in str(ask(wrong, sgl.RuntimeEndpoint(server.url)).error())


def test_streams_cache_and_info(server):
    endpoint = sgl.RuntimeEndpoint(server.url)
    state = ask(sgl.gen("a"), endpoint, stream=True)
    assert "".join(state.text_iter("a")) == state["a"] == "abc" and state.get_meta_info("a") == {"end": 3}
    sgl.flush_cache(endpoint)
    assert server.bodies("/flush_cache") == [{}] and sgl.get_server_info(endpoint) == {"version": "1"}
    with pytest.raises(sgl.ProgramError, match="unknown is not known"):
        sgl.RuntimeEndpoint(server.url, chat_template_name="unknown")
    empty = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(backend=endpoint)
    assert "needs a prompt" in str(empty.error())


@pytest.mark.parametrize("choices, method, chosen", [
    (["az", "bb"], sgl.token_length_normalized, "bb"),  # means of -6.75 and -1
    (["az", "bb"], sgl.greedy_token_selection, "az"),
    (["a", "ab"], sgl.greedy_token_selection, "a"),  # its average goes on
    (["b", "y"], sgl.unconditional_likelihood_normalized, "b"),
    (["cz", "ab"], sgl.unconditional_likelihood_normalized, "cz"),  # a likelier "z" than without the prompt
])
def test_choices(server, choices, method, chosen):
    state = ask(sgl.select("a", choices, choices_method=method), sgl.RuntimeEndpoint(server.url))
    assert state["a"] == chosen and state.text() == "xq" + chosen
    first, second = server.bodies("/generate")[:2]
    assert first["text"] == "xq" and first["sampling_params"] == {"max_new_tokens": 0}
    assert second["text"] == ["xq" + choice for choice in choices] and second["logprob_start_len"] == 0
    info = state.get_meta_info("a")
    assert ["".join(token[2] for token in each) for each in info["input_token_logprobs"]] == choices
    assert len(server.bodies("/generate")) == 2 + method.needs_unconditional


def test_a_token_across_the_prompts_end_is_the_choices():
    from baton.lang.backends.native import _of_choice

    tokens = [[-1.0, 1, "th"], [-2.0, 2, "e cat"]]
    assert _of_choice(tokens, "saw the", " cat") == tokens[1:]
    assert _of_choice([[-1.0, 1, "b"], [-1.0, 2, "b"]], "bb", "b") == [[-1.0, 2, "b"]]
    assert _of_choice([[-1.0, 1, "c"]], "b", "c") == [[-1.0, 1, "c"]]


def test_refusals_and_a_dead_server():
    with stub_server({**INFO, "/generate": lambda body: (400, {"error": {"message": "Too warm."}})}) as stub:
        endpoint = sgl.RuntimeEndpoint(stub.url)
        state = ask(sgl.gen("a"), endpoint)
        assert (str(state.error()), state.error().status) == ("Too warm.", 400)
    assert "Cannot reach" in str(ask(sgl.gen("a"), endpoint).error())
    with stub_server({**INFO, "/generate": lambda body: iter([{"error": {"message": "Out of pages."}}])}) as stub:
        assert str(ask(sgl.gen("a"), sgl.RuntimeEndpoint(stub.url), stream=True).error()) == "Out of pages."
    with stub_server({"/get_model_info": lambda _: (503, "Starting.")}) as stub, pytest.raises(sgl.BackendError,
                                                                                              match="Starting"):
        sgl.RuntimeEndpoint(stub.url)


# ---------------------------------------------------------------------- templates


def render(template: ChatTemplate) -> Any:
    def rendered(messages: list[dict[str, Any]], generation: bool) -> str:
        before, text = None, ""
        for message in messages:
            role = message["role"]
            text, before = text + template.begin(role, before) + message["content"] + template.end(role), role
        return text + (template.turns["assistant"][0] if generation else "")

    return rendered


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama-3-instruct", "llama-4", "vicuna_v1.1"])
def test_templates_are_learned(name):
    template = TEMPLATES[name]
    found = learn_template(render(template))
    assert found is not None and (found.turns, found.opening) == (template.turns, template.opening)


def test_a_template_that_joins_turns_is_not_learned():
    assert learn_template(render(TEMPLATES["llama-2-chat"])) is None
    assert template_of_model("org/Llama-2-7b-chat-hf") is TEMPLATES["llama-2-chat"]
    assert template_of_model("gpt2") is TEMPLATES["default"]


def test_the_servers_own_template_is_used_without_what_its_tokenizer_adds():
    def tokenize(body):
        text = body["prompt"] if "prompt" in body else render(TEMPLATES["llama-3-instruct"])(
            body["messages"], body["add_generation_prompt"])
        return {"tokens": [1, *map(ord, text)]}

    def detokenize(body):
        assert body["skip_special_tokens"] is False
        return {"text": "".join("<bos>" if token == 1 else chr(token) for token in body["tokens"])}

    with stub_server({**INFO, "/tokenize": tokenize, "/detokenize": detokenize}) as stub:
        template = sgl.RuntimeEndpoint(stub.url).chat_template()
    assert template.turns == TEMPLATES["llama-3-instruct"].turns and template.opening == ""


def test_a_server_that_tokenizes_no_messages_has_its_models_template(server):
    assert sgl.RuntimeEndpoint(server.url).chat_template() is TEMPLATES["qwen"]


# ---------------------------------------------------------------------- other providers


def openai_chat(body: Any) -> Any:
    if body.get("stream"):
        return ({"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m",
                 "choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
                for piece in ("Pa", "ris"))
    text = '{"choice": "yes"}' if "response_format" in body else body["messages"][-1]["content"].upper()
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice] * body.get("n", 1)}


def openai_completion(body: Any) -> Any:
    return {"id": "1", "object": "text_completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "text": body["prompt"][::-1], "finish_reason": "stop", "logprobs": None}]}


@pytest.fixture(params=["package", "http"])
def openai_backend(request):
    with stub_server({"/chat/completions": openai_chat, "/completions": openai_completion}) as stub:
        transport = HTTPTransport(stub.url, "k") if request.param == "http" else None

        def make(**options: Any) -> Any:
            return stub, sgl.OpenAI("m", base_url=stub.url, api_key="k", transport=transport, **options)

        yield make


def dialogue(s: sgl.ProgramState) -> None:
    s += sgl.system("Shout.")
    s += sgl.user("hello")
    s += sgl.assistant(sgl.gen("a", max_tokens=4, stop=["."]))


def test_openais_chats(openai_backend):
    stub, backend = openai_backend()
    state = sgl.function(dialogue).run(backend=backend, temperature=0.0)
    assert state["a"] == "HELLO" and state.get_meta_info("a")["finish_reason"] == "stop"
    assert stub.bodies("/chat/completions") == [
        {"model": "m", "messages": [{"role": "system", "content": "Shout."}, {"role": "user", "content": "hello"}],
         "stop": ["."], "temperature": 0.0, "max_tokens": 4}]
    assert stub.headers[-1]["authorization"] == "Bearer k"
    assert "".join(sgl.function(dialogue).run(backend=backend, stream=True).text_iter("a")) == "Paris"
    assert ask(sgl.gen("a", n=2), backend)["a"] == ["XQ", "XQ"]  # no turns: one of the user
    assert ask(sgl.select("a", ["no", "yes"]), backend)["a"] == "yes"
    with stub_server({}) as other:
        error = ask(sgl.gen("a"), sgl.OpenAI("m", base_url=other.url, api_key="k")).error()
        assert isinstance(error, sgl.BackendError) and error.status == 404


def test_openais_completions_and_refusals(openai_backend):
    stub, backend = openai_backend(is_chat_model=False)
    assert ask(sgl.gen("a"), backend)["a"] == "qx" and stub.bodies("/completions")[0]["prompt"] == "xq"
    assert "needs a chat model" in str(ask(sgl.select("a", ["b"]), backend).error())
    assert "no regex" in str(ask(sgl.gen("a", regex="b"), backend).error())
    _, chats = openai_backend()

    def within(s):
        s += sgl.user("hello") + sgl.assistant("I " + sgl.gen("a"))

    assert "all of assistant" in str(sgl.function(within).run(backend=chats).error())
    for refused in (sgl.flush_cache, sgl.get_server_info):
        with pytest.raises(sgl.ProgramError, match="RuntimeEndpoint"):
            refused(backend)


def test_without_the_package_options_are_refused(monkeypatch):
    from baton.lang.backends import openai

    monkeypatch.setattr(openai, "find_spec", lambda name: None)
    assert isinstance(sgl.OpenAI("m")._transport, HTTPTransport)
    with pytest.raises(sgl.ProgramError, match="pip install openai"):
        sgl.OpenAI("m", timeout=3)


@pytest.mark.parametrize("make, package", [(sgl.Anthropic, "anthropic"), (sgl.LiteLLM, "litellm")])
def test_packages_that_are_missing_are_named(monkeypatch, make, package):
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(sgl.ProgramError, match=f"pip install {package}"):
        make("m")


def test_anthropics_messages():
    def answer(body):
        return {"id": "1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
                "stop_sequence": None, "content": [{"type": "text", "text": body["messages"][-1]["content"].upper()}],
                "usage": {"input_tokens": 1, "output_tokens": 1}}

    with stub_server({"/v1/messages": answer}) as stub:
        backend = sgl.Anthropic("m", base_url=stub.url, api_key="k")
        state = sgl.function(dialogue).run(backend=backend)
        assert state["a"] == "HELLO" and state.get_meta_info("a")["stop_reason"] == "end_turn"
        assert stub.bodies("/v1/messages") == [{"model": "m", "max_tokens": 4, "system": "Shout.",
                                                "messages": [{"role": "user", "content": "hello"}],
                                                "stop_sequences": ["."]}]
    for words in (lambda: state["a"] and backend.select(Prompt("x"), ["a"], sgl.token_length_normalized),
                  lambda: backend.generate(Prompt("x"), SamplingParams(top_logprobs_num=1)),
                  backend.flush_cache, backend.get_server_info):
        with pytest.raises(sgl.ProgramError, match="Anthropic"):
            words()


def test_litellm(monkeypatch):
    calls = []

    class Said:
        def __init__(self, body):
            self._body = body

        def model_dump(self):
            return self._body

    def completion(**body):
        calls.append(body)
        found = openai_chat({name: value for name, value in body.items() if name != "api_base"})
        return map(Said, found) if body.get("stream") else Said(found)

    module = types.ModuleType("litellm")
    module.completion = completion  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "litellm", module)
    backend = sgl.LiteLLM("provider/m", api_base="http://there")
    assert sgl.function(dialogue).run(backend=backend)["a"] == "HELLO" and calls[0]["api_base"] == "http://there"
    assert sgl.function(dialogue).run(backend=backend, stream=True)["a"] == "Paris"
    assert json.dumps(calls[0]["messages"][0]) == '{"role": "system", "content": "Shout."}'
