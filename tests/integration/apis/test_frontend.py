"""Programs of the frontend language on a server, and those of its page."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import baton.lang as sgl

PAGE = Path(__file__).resolve().parents[3] / "docs/frontend.md"
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}


@pytest.fixture(params=["unified", "relay"])
def endpoint(request):
    """The server alone, and router, prefill and decode server."""
    return sgl.RuntimeEndpoint(request.getfixturevalue(request.param).url)


@sgl.function
def qa(s, country):
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=16))


def test_the_pages_programs_run(unified, monkeypatch, capsys):
    monkeypatch.setattr(sgl.backends.default, "_CHOSEN", {})
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    space: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("http://localhost:30000", unified.url), space)
    said = capsys.readouterr().out
    assert "Paris Rome\nsystem : You are a helpful assistant.\n" in said
    assert re.search(r"^\d{1,3}(\.\d{1,3}){3}$", said, re.MULTILINE) and "Answer: " in said
    assert "['Rome', 'Paris', 'Tokyo']" in said


def test_answers_are_those_of_the_chat_api(endpoint):
    assert endpoint.chat_template().turns["assistant"] == ("<|im_start|>assistant\n", "<|im_end|>\n")
    states = qa.run_batch([[country] for country in CAPITALS], backend=endpoint, temperature=0)
    assert [state["answer"] for state in states] == list(CAPITALS.values())
    stream = qa.run("France", backend=endpoint, temperature=0, stream=True)
    assert "".join(stream.text_iter("answer")) == "Paris"
    assert stream.get_meta_info("answer")["completion_tokens"] > 0


@pytest.mark.parametrize("method", [sgl.token_length_normalized, sgl.greedy_token_selection,
                                    sgl.unconditional_likelihood_normalized], ids=lambda method: method.name)
def test_choices(endpoint, method):
    @sgl.function
    def choose(s, country):
        s += sgl.user(f"What is the capital of {country}?")
        s += sgl.assistant(sgl.gen("answer", choices=[*CAPITALS.values()], choices_method=method))

    for country, capital in CAPITALS.items():
        state = choose.run(country, backend=endpoint)
        assert state["answer"] == capital
        tokens = state.get_meta_info("answer")["input_token_logprobs"]
        assert ["".join(token[2] for token in each) for each in tokens] == [*CAPITALS.values()]


def test_typed_values_and_prefixes(unified):
    backend = sgl.RuntimeEndpoint(unified.url)

    @sgl.function
    def typed(s):
        s += "Twelve and seven make "
        forks = s.fork(2)
        forks += [sgl.gen_int("number", max_tokens=4), sgl.gen("flag", dtype=bool, max_tokens=8)]
        forks.join()

    state = typed.run(backend=backend, temperature=0)
    assert len(state["number"]) == 1 and int(state["number"][0]) is not None
    assert state["flag"][0] in ("True", "False")
    assert "internal_states" in sgl.get_server_info(backend)


async def test_asynchronous_streams(unified):
    backend = await asyncio.to_thread(sgl.RuntimeEndpoint, unified.url)
    state = qa.run("Italy", backend=backend, temperature=0, stream=True)
    assert "".join([piece async for piece in state.text_async_iter("answer")]) == "Rome"


def test_openais_api_of_the_server(unified):
    backend = sgl.OpenAI("tinychat", base_url=f"{unified.url}/v1", api_key="none")
    assert qa.run("France", backend=backend, temperature=0.0)["answer"] == "Paris"

    @sgl.function
    def choose(s):
        s += sgl.user("What is the capital of Japan?")
        s += sgl.assistant(sgl.select("answer", ["Tokyo", "Oslo"]))

    assert choose.run(backend=backend)["answer"] in ("Tokyo", "Oslo")


def test_refusals_reach_the_program(unified):
    state = qa.run("France", backend=sgl.RuntimeEndpoint(unified.url), temperature=-1)
    with pytest.raises(sgl.BackendError, match="temperature"):
        state["answer"]
