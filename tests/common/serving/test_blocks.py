"""Messages as rows of blocks, and reasoning in the APIs that tell them so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from baton.common.serving.chat.blocks import AnswerBlocks, BlockDelta, BlockStart, BlockStop
from baton.common.serving.chat.schema import (
    CalledFunction,
    CalledFunctionDelta,
    ChatDelta,
    ChatMessage,
    ToolCallDelta,
    ToolCallOut,
)
from baton.tests.helpers.serving import Server

THOUGHT = "<think>hm</think>hello"


def call(index: int, arguments: str, name: str = "") -> ChatDelta:
    head = {"id": f"c{index}"} if name else {}
    function = CalledFunctionDelta(arguments, name) if name else CalledFunctionDelta(arguments)
    return ChatDelta(tool_calls=[ToolCallDelta(index, function, **head)])


def told(blocks: AnswerBlocks) -> list[tuple[str, str, str, str]]:
    return [(block.kind, block.text, block.call_id, block.name) for block in blocks.blocks]


def test_a_stream_comes_to_what_the_whole_message_says() -> None:
    blocks = AnswerBlocks()
    deltas = [ChatDelta(role="assistant", content=""), ChatDelta(reasoning_content="h"),
              ChatDelta(reasoning_content="m"), ChatDelta(content="so"), ChatDelta(content=" be it"),
              call(0, "", "f"), call(0, '{"a"'), call(0, ": 1}"), call(1, "{}", "g")]
    changes = [change for delta in deltas for change in blocks.add(delta, [])] + blocks.end()
    assert [type(change) for change in changes] == [
        BlockStart, BlockDelta, BlockDelta, BlockStop, BlockStart, BlockDelta, BlockDelta, BlockStop, BlockStart,
        BlockDelta, BlockDelta, BlockStop, BlockStart, BlockDelta, BlockStop]
    whole = ChatMessage("so be it", [ToolCallOut("c0", CalledFunction("f", '{"a": 1}')),
                                     ToolCallOut("c1", CalledFunction("g", "{}"))], reasoning_content="hm")
    assert told(blocks) == told(AnswerBlocks.of(whole, [])) == [
        ("reasoning", "hm", "", ""), ("text", "so be it", "", ""), ("call", '{"a": 1}', "c0", "f"),
        ("call", "{}", "c1", "g")]
    assert [block.index for block in blocks.blocks] == [0, 1, 2, 3]


def test_a_message_that_says_nothing_is_an_empty_text() -> None:
    blocks = AnswerBlocks()
    assert blocks.add(ChatDelta(role="assistant", content=""), []) == []
    assert [type(change) for change in blocks.end()] == [BlockStart, BlockStop]
    assert told(blocks) == told(AnswerBlocks.of(ChatMessage(None), [])) == [("text", "", "", "")]
    assert blocks.end() == []


@pytest.fixture(scope="module")
def thinker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("thinker") / "log", "--model-path", str(checkpoint), "--reasoning-parser",
                    "qwen3")
    try:
        yield server.wait_ready()
    finally:
        server.kill()


def test_reasoning_is_an_item_of_its_own(thinker: Server) -> None:
    with openai.OpenAI(base_url=thinker.url + "/v1", api_key="none", max_retries=0) as ai:
        answer = ai.responses.create(model="tiny", input=THOUGHT)
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text == "hm" and answer.output_text == "hello"  # type: ignore[union-attr]
        assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
        events = list(ai.responses.create(model="tiny", input=THOUGHT, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == ["reasoning", "message"]
    last: Any = events[-1]
    assert last.response.output_text == "hello" and last.response.output[0].content[0].text == "hm"


def test_thinking_is_a_block_of_its_own(thinker: Server) -> None:
    ask: Any = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": THOUGHT}]}
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as claude:
        answer = claude.messages.create(**ask)
        with claude.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
    for message in (answer, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "hm" and message.content[1].text == "hello"  # type: ignore[union-attr]
