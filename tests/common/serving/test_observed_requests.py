"""Requests in files, logs and metrics as flags say, paths behind a proxy, and what flags add to answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import ObserveArgs
from baton.common.serving.context.request_log import RequestLog
from baton.tests.helpers.serving import Server, user

CHAT: dict[str, Any] = {"messages": user("hello world")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def observed(checkpoint: Path, folder: Path) -> Iterator[Server]:
    server = Server(
        folder / "log", "--model-path", str(checkpoint), "--log-requests", "--log-requests-level", "2",
        "--log-requests-format", "text", "--log-requests-target", "stdout", str(folder / "lines"),
        "--export-metrics-to-file", "--export-metrics-to-file-dir", str(folder / "export"), "--extra-metric-labels",
        '{"team": "search"}', "--fastapi-root-path", "/llm/a", "--log-level-http", "info",
        "--uvicorn-access-log-exclude-prefixes", "/health", "/v1/models", "--return-input-ids", "--return-output-ids",
        "--abort-on-priority-when-disabled", "--trust-request-chat-template")
    try:
        yield server.wait_ready()
    finally:
        server.kill()


@pytest.fixture
async def session(observed: Server) -> Any:
    async with aiohttp.ClientSession(observed.url) as opened:
        yield opened


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with session.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def test_a_request_leaves_a_line_and_a_record(session: aiohttp.ClientSession, folder: Path,
                                                    observed: Server) -> None:
    status, answer = await post(session, "/generate", text="hello world", rid="named",
                                sampling_params={"max_new_tokens": 2, "temperature": 0.25})
    assert status == 200
    lines = (folder / "lines" / "requests.log").read_text().splitlines()
    begin, end = (line for line in lines if 'rid="named"' in line)
    assert begin.startswith('begin rid="named" prompt_tokens=') and '"temperature":0.25' in begin
    assert end.startswith('end rid="named" outcome="length" output_tokens=2 seconds=')
    assert "rid" not in observed.log.read_text(), "the lines go to their targets alone"
    await until(lambda: list((folder / "export").glob("sglang-request-metrics-????????_??.log")))
    [file] = (folder / "export").iterdir()
    await until(lambda: "named" in file.read_text())
    [record] = [each for each in map(json.loads, file.read_text().splitlines()) if each["id"] == "named"]
    info = answer["meta_info"]
    assert {name: record[name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "weight_version")
            } == {name: info[name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens",
                                                "weight_version")}
    assert record["finish_reason"] == {"type": "length"} and 0 < record["time_to_first_token"] < record["e2e_latency"]
    assert json.loads(record["request_parameters"])["sampling"]["temperature"] == 0.25


async def until(condition: Any) -> None:
    import asyncio

    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.02)


async def test_metrics_have_the_labels(session: aiohttp.ClientSession) -> None:
    await post(session, "/generate", text="x")
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    own = [line for line in lines if line.startswith(("baton:", "sglang:"))]
    assert any(line.startswith("sglang:num_running_reqs{") for line in own)
    assert own and all('team="search"' in line for line in own), next(x for x in own if "team=" not in x)


async def test_paths_below_the_root(session: aiohttp.ClientSession) -> None:
    for path in ("/llm/a/v1/models", "/v1/models", "/llm/a/health"):
        async with session.get(path) as answer:
            assert answer.status == 200, path
    for path in ("/llm/v1/models", "/llm/a", "/llm/ab/v1/models"):
        async with session.get(path) as answer:
            assert answer.status == 404, path
    status, answer = await post(session, "/llm/a/v1/chat/completions?x=1", **CHAT)
    assert status == 200 and answer["choices"][0]["message"]["content"]


async def test_the_http_log_leaves_paths_out(session: aiohttp.ClientSession, observed: Server) -> None:
    for path in ("/v1/models", "/get_load", "/health"):
        async with session.get(path) as answer:
            assert answer.status == 200
    await until(lambda: "GET /get_load" in observed.log.read_text())
    logged = observed.log.read_text()
    assert "GET /v1/models" not in logged and "GET /health" not in logged


async def test_ids_in_chats(session: aiohttp.ClientSession) -> None:
    status, answer = await post(session, "/v1/chat/completions", **CHAT, n=2, return_token_ids=True)
    assert status == 200
    assert answer["sglext"] == {"input_ids": answer["choices"][0]["prompt_token_ids"],
                                "output_ids": [choice["response_token_ids"] for choice in answer["choices"]]}
    async with session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in (await stream.text()).splitlines() if line.startswith("data: {")]
    assert events[-1]["choices"] == [] and events[-1]["sglext"]["output_ids"][0]
    assert not any("sglext" in event for event in events[:-1])


async def test_ids_where_a_request_asks(http: aiohttp.ClientSession) -> None:
    for field, name in (("return_input_ids_in_sglext", "input_ids"), ("return_output_ids_in_sglext", "output_ids")):
        status, answer = await post(http, "/v1/chat/completions", **CHAT, **{field: True})
        assert status == 200 and answer["sglext"].keys() == {name}


async def test_templates_of_requests(session: aiohttp.ClientSession, http: aiohttp.ClientSession) -> None:
    template = "{{ messages[0].content }} again"
    for fields in ({"chat_template": template}, {"chat_template_kwargs": {"chat_template": template}}):
        status, answer = await post(session, "/v1/chat/completions", **CHAT, **fields)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "hello world again"
        status, answer = await post(http, "/v1/chat/completions", **CHAT, **fields)
        assert status == 400 and "--trust-request-chat-template" in answer["error"]["message"]
    status, answer = await post(session, "/v1/chat/completions", **CHAT, chat_template="{% for %}")
    assert status == 400 and "The chat template rejects" in answer["error"]["message"]
    status, answer = await post(session, "/v1/chat/completions", **CHAT, chat_template_kwargs={"chat_template": 3})
    assert status == 400 and "must be a text" in answer["error"]["message"]


async def test_priorities_without_a_schedule(session: aiohttp.ClientSession, http: aiohttp.ClientSession) -> None:
    for path, body in (("/generate", {"text": "x"}), ("/v1/completions", {"prompt": "x"})):
        status, answer = await post(session, path, **body, priority=1)
        assert status == 400 and answer["error"]["param"] == "priority"
        assert (await post(http, path, **body, priority=1))[0] == 200


async def test_the_form_of_lines_changes(session: aiohttp.ClientSession, folder: Path) -> None:
    for form, first in (("json", "{"), ("text", "b")):
        assert (await post(session, "/configure_logging", log_requests_format=form))[0] == 200
        await post(session, "/generate", text="x", rid=f"in {form}")
        lines = [line for line in (folder / "lines" / "requests.log").read_text().splitlines() if f"in {form}" in line]
        assert lines[0][0] == first


@pytest.mark.parametrize("flags, sentence", [
    ({"export_metrics_to_file": True}, "--export-metrics-to-file-dir go together"),
    ({"log_requests_target": ("stdout",)}, "are for the lines of --log-requests"),
    ({"log_requests_format": "text"}, "are for the lines of --log-requests"),
    ({"otlp_service_name": "x"}, "--otlp-service-name names spans"),
    ({"soft_watchdog_timeout": -1.0}, "--soft-watchdog-timeout must be 0 or more"),
    ({"extra_metric_labels": "[]"}, "--extra-metric-labels must be a JSON object"),
    ({"extra_metric_labels": '{"a": 1}'}, "takes texts"), ({"extra_metric_labels": '{"le": "1"}'}, "cannot be a label"),
    ({"extra_metric_labels": '{"a": "1"}', "tokenizer_metrics_allowed_custom_labels": ("a",)}, "another name")])
def test_flags_that_are_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ObserveArgs(**flags)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Cannot write to --log-requests-target"):
        RequestLog.of(ObserveArgs(log_requests=True, log_requests_target=(str(tmp_path / "file" / "x"),)), 0)
