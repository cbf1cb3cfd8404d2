"""Tools that the server runs within ``/v1/responses``: real MCP servers, and a model that says its prompt again."""

from __future__ import annotations

import json
import os
import stat
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.common.api.errors import ConfigError
from baton.common.serving.tool_servers import docker_python
from baton.common.serving.tool_servers.base import cut
from baton.common.serving.tool_servers.docker_python import DockerPython
from baton.common.serving.tool_servers.start import start_tool_servers
from baton.tests.helpers.mcp_tools import mcp_server
from baton.tests.helpers.ports import free_port
from baton.tests.helpers.serving import Server

CALC: Any = {"type": "mcp", "server_label": "calc", "require_approval": "never"}


def calling(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


@pytest.fixture(scope="module")
def calculator() -> Iterator[str]:
    with mcp_server("calc") as address:
        yield address


@pytest.fixture(scope="module")
def tooled(checkpoint: Path, calculator: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with mcp_server("browser", "sse") as browser:
        server = Server(tmp_path_factory.mktemp("tools") / "log", "--model-path", str(checkpoint), "--tool-call-parser",
                        "hermes", "--tool-server", f"{calculator},http://{browser}/sse", "--max-tool-rounds", "3")
        try:
            yield server.wait_ready()
            assert "Traceback" not in server.log.read_text()
        finally:
            server.kill()


@pytest.fixture
def ai(tooled: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=tooled.url + "/v1", api_key="x", max_retries=0)


async def test_a_tool_is_called_and_the_model_goes_on(ai: openai.AsyncOpenAI) -> None:
    said = "[sum]" + calling("add", a=1, b=2)
    answer = await ai.responses.create(model="tiny", input=said, tools=[CALC], max_tool_calls=1)
    kinds = [item.type for item in answer.output]
    assert kinds == ["message", "mcp_call", "message"] or kinds == ["message", "mcp_call", "message", "message"]
    call = answer.output[1]
    assert call.type == "mcp_call" and (call.name, call.server_label, call.output) == ("add", "calc", "3")
    assert json.loads(call.arguments) == {"a": 1, "b": 2} and call.error is None and answer.status == "completed"
    last = answer.output[-1]
    assert last.type == "message" and last.content[0].text.endswith("3"), "the result is the last that the model reads"  # type: ignore[union-attr]
    assert answer.usage and answer.usage.input_tokens > 2 * len(said), "the usage is that of both rounds"
    further = await ai.responses.create(model="tiny", input="[next]", previous_response_id=answer.id)
    assert further.output_text.endswith("3[next]") or "3" in further.output_text


async def test_events(ai: openai.AsyncOpenAI) -> None:
    stream = await ai.responses.create(model="tiny", input=calling("add", a=1, b=2), stream=True, max_tool_calls=1,
                                       tools=[{**CALC, "allowed_tools": ["add"]}])
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    at = kinds.index("response.mcp_call_arguments.done")
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.mcp_call.in_progress"]
    assert kinds.index("response.mcp_call.completed") > at and kinds[-1] == "response.completed"
    done = [event for event in events if event.type == "response.output_item.done"]
    done.sort(key=lambda event: event.output_index)  # What follows a call in the same round ends before it.
    call = done[0].item
    assert call.type == "mcp_call" and (call.output, call.status) == ("3", "completed")  # type: ignore[attr-defined]
    final = events[-1].response  # type: ignore[union-attr]
    assert [item.id for item in final.output] == [event.item.id for event in done]
    assert (await ai.responses.retrieve(final.id)).output_text == final.output_text


async def test_rounds_are_bounded(ai: openai.AsyncOpenAI) -> None:
    """The fake model calls the tool again in each round, until it is offered none."""
    answer = await ai.responses.create(model="tiny", input=calling("add", a=1, b=2), tools=[CALC])
    calls = [item for item in answer.output if item.type == "mcp_call"]
    assert answer.status == "completed" and answer.output[-1].type == "message" and len(calls) >= 3
    assert {call.output for call in calls} == {"3"}


async def test_what_goes_wrong_is_read_by_the_model(ai: openai.AsyncOpenAI) -> None:
    for said, why in ((calling("fail", why="no luck"), "Error executing"), (calling("add", a="x"), "validation error")):
        answer = await ai.responses.create(model="tiny", input=said, tools=[CALC], max_tool_calls=1)
        call = next(item for item in answer.output if item.type == "mcp_call")
        assert call.status == "failed" and why in (call.error or "")  # type: ignore[attr-defined]
        assert why in answer.output_text or answer.status == "incomplete"


async def test_functions_of_the_client_end_the_rounds(ai: openai.AsyncOpenAI) -> None:
    mine: Any = {"type": "function", "name": "mine", "parameters": {"type": "object"}, "strict": False}
    answer = await ai.responses.create(model="tiny", input=calling("add", a=1, b=2) + calling("mine", x=1),
                                       tools=[CALC, mine])
    assert {item.type for item in answer.output} >= {"mcp_call", "function_call"}
    assert sum(item.type == "mcp_call" for item in answer.output) == 1


async def test_built_in_names_and_the_background(ai: openai.AsyncOpenAI) -> None:
    answer = await ai.responses.create(model="tiny", input=calling("capital", country="France"), background=True,
                                       tools=[{"type": "web_search_preview"}], max_tool_calls=1, stream=True)
    last = [event async for event in answer][-1]
    assert last.type == "response.completed" and "Paris" in last.response.output_text
    assert last.response.output[0].server_label == "browser"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="needs the tool server 'python'.* are calc, browser"):
        await ai.responses.create(model="tiny", input="x", tools=[
            {"type": "code_interpreter", "container": {"type": "auto"}}])


async def test_harmony(checkpoint: Path, calculator: str, tmp_path: Path) -> None:
    said = ('<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add '
            '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>')
    server = Server(tmp_path / "log", "--model-path", str(checkpoint), "--tool-call-parser", "gpt-oss",
                    "--reasoning-parser", "gpt-oss", "--tool-server", calculator)
    try:
        server.wait_ready()
        ai = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        answer = await ai.responses.create(model="tiny", input=said, tools=[CALC], max_tool_calls=1)
        assert [item.type for item in answer.output][:3] == ["reasoning", "message", "mcp_call"]
        assert answer.output[2].output == "3" and answer.output[2].status == "completed"  # type: ignore[union-attr]
    finally:
        server.kill()


# ---------------------------------------------------------------- starting them


async def test_servers_that_cannot_be_used(calculator: str) -> None:
    with pytest.raises(ConfigError, match="no MCP server answers there"):
        await start_tool_servers(f"127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="two servers are called 'calc'"):
        await start_tool_servers(f"{calculator},{calculator}")
    assert await start_tool_servers(None) == {}


DOCKER = """\
    #!{python}
    import os, subprocess, sys
    with open({log!r}, "a") as log:
        print(*sys.argv[1:], file=log)
    if sys.argv[1] == "image":
        sys.exit({missing})
    if sys.argv[1] == "kill":
        sys.exit(0)
    os.execv(sys.executable, [sys.executable, "-I", "-"])
"""


def fake_docker(folder: Path, monkeypatch: pytest.MonkeyPatch, missing: int = 0) -> Path:
    """A command that runs programs without a container, and logs what it was asked for."""
    import sys
    log, script = folder / "log", folder / "docker"
    script.write_text(textwrap.dedent(DOCKER).format(python=sys.executable, log=str(log), missing=missing))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder) + os.pathsep + os.environ["PATH"])
    return log


async def test_the_demo_runs_programs_in_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_docker(tmp_path, monkeypatch)
    monkeypatch.setattr(docker_python, "_RUN_SECONDS", 1.0)
    servers = await start_tool_servers("demo")
    async with servers["python"].session() as session:
        assert await session.call("python", {"code": "print(6 * 7)"}) == ("42\n", False)
        broken = await session.call("python", {"code": "1 / 0"})
        assert broken.is_error and "ZeroDivisionError" in broken.text
        assert (await session.call("python", {})).is_error
        slow = await session.call("python", {"code": "import time; time.sleep(60)"})
        assert slow == ("The program was ended after 1 s.", True)
        much = await session.call("python", {"code": "while True: print('x' * 1000)"})
        assert "[cut: " in much.text and len(much.text) < 101_000
    lines = log.read_text().splitlines()
    runs = [line for line in lines if line.startswith("run ")]
    for option in ("--network none", "--memory 512m", "--read-only", "--cap-drop ALL", "--pids-limit 64",
                   "--security-opt no-new-privileges", "--user 65534:65534", "--rm"):
        assert all(option in line for line in runs)
    assert sum(line.startswith("kill baton-python-") for line in lines) == 2


async def test_the_demo_without_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="this host has no docker"):
        await DockerPython.start()
    monkeypatch.undo()
    fake_docker(tmp_path, monkeypatch, missing=1)
    with pytest.raises(ConfigError, match="docker pull python:3.11-slim"):
        await DockerPython.start()


def test_long_answers_are_cut() -> None:
    assert cut("x" * 10) == "x" * 10 and len(cut("x" * 200_000)) < 100_100
