"""SGLang's JSON chat templates: each separator style's prompt, their stops, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.common.api.errors import ConfigError, InvalidRequest
from baton.common.tokenizer.tokenizer import Tokenizer, load_tokenizer
from baton.tests.helpers.fake_engine import make_checkpoint

DOCUMENTED = {
    "name": "my_model", "system": "<|im_start|>system", "user": "<|im_start|>user",
    "assistant": "<|im_start|>assistant", "sep_style": "CHATML", "sep": "<|im_end|>",
    "stop_str": ["<|im_end|>", "<|im_start|>"]}
TALK = [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}]
PROMPTS = {  # of TALK, with the words Y, U, A and the separators / and |
    "ADD_COLON_SINGLE": "Y\nS/U: a/A: b/U: c/A:", "ADD_COLON_TWO": "Y\nS/U: a/A: b|U: c/A:",
    "ADD_COLON_SPACE_SINGLE": "Y\nS/U: a/A: b/U: c/A: ", "NO_COLON_SINGLE": "Y\nSUa/Ab/Uc/A",
    "NO_COLON_TWO": "Y\nSUa/Ab|Uc/A", "ADD_NEW_LINE_SINGLE": "Y\nS/U\na/A\nb/U\nc/A\n",
    "LLAMA2": "Y\nSa A b|U c/A",
    "LLAMA3": "Y\nS<|start_header_id|>U<|end_header_id|>\n\na<|eot_id|>"
              "<|start_header_id|>A<|end_header_id|>\n\nb<|eot_id|>"
              "<|start_header_id|>U<|end_header_id|>\n\nc<|eot_id|><|start_header_id|>A<|end_header_id|>\n\n",
    "LLAMA4": "Y\nS<|header_start|>U<|header_end|>\n\na<|eot|><|header_start|>A<|header_end|>\n\nb<|eot|>"
              "<|header_start|>U<|header_end|>\n\nc<|eot|><|header_start|>A<|header_end|>\n\n",
    "CHATGLM": "Y\nS/[Round 0]/U：a/A：b/[Round 1]/U：c/A：", "CHATML": "Y\nS/\nU\na/\nA\nb/\nU\nc/\nA\n",
    "CHATINTERN": "Y\nS<s>U:a/\nA:b|\n<s>U:c/\nA:", "DOLLY": "Y\nSU:\na/A:\nb|\n\nU:\nc/A:\n",
    "RWKV": "Y\nSU: a\n\nA: b\n\nU: c\n\nA:", "PHOENIX": "Y\nSU: <s>a</s>A: <s>b</s>U: <s>c</s>A: <s>",
    "ROBIN": "Y\nS/U:\na/A:\nb/U:\nc/A:\n", "FALCON_CHAT": "Y\nS/U: a/A: b/U: c/A:",
    "CHATGLM3": "Y\nSU\naA\nbU\ncA", "DEEPSEEK_CHAT": "Y\nSU: a/A: b|U: c/A:",
    "METAMATH": "Y\nS/U:\na/A: |bU:\nc/A: |", "DeepSeekVL2": "Y\nS/U: a/A: b|U: c/A:",
    "QWEN2_AUDIO": "Y\nS/U\na/A\nb/U\nc/A\n", "GEMMA3": "Y\nSa/Ab/Uc/A", "MPT": "Y\nS/Ua/Ab/Uc/A",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"))))


def chosen(tokenizer: Tokenizer, folder: Path, template: Any, name: str = "template.json") -> Tokenizer:
    file = folder / name
    file.write_text(template if isinstance(template, str) else json.dumps(template))
    return tokenizer.with_chat_template(str(file))


def prompt(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.render_chat(messages, **{"tools": None, "continue_final_message": False, "options": {}} | options)


@pytest.mark.parametrize("style", PROMPTS)
def test_separator_styles(tokenizer: Tokenizer, tmp_path: Path, style: str) -> None:
    template = {"name": "x", "system": "Y", "user": "U", "assistant": "A", "sep_style": style, "sep": "/", "sep2": "|"}
    assert prompt(chosen(tokenizer, tmp_path, template), TALK) == PROMPTS[style]


def test_the_documented_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ours = chosen(tokenizer, tmp_path, DOCUMENTED)
    assert prompt(ours, TALK[1:2]) == ("<|im_start|>system\n<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
                                       "<|im_start|>assistant\n")
    assert ours.chat_stops(300) == (("<|im_end|>", "<|im_start|>"), ())
    other = DOCUMENTED | {"system_message": "Be {{ kind }} ü😀", "stop_str": "<end>"}
    named = chosen(tokenizer, tmp_path, other, "form")
    assert prompt(named, TALK[1:2]).startswith("<|im_start|>system\nBe {{ kind }} ü😀<|im_end|>\n")
    assert named.chat_stops(300) == ((), (2,)), "a special token has no text that a stop string could be found in"
    assert named.chat_stops(2) == ((), ()), "the model has no row for it"
    half = [*TALK[1:2], {"role": "assistant", "content": "so far"}]
    assert prompt(named, half, continue_final_message=True).endswith("<|im_start|>assistant\nso far")
    for messages, options, why in ((TALK, {"tools": [{"type": "function"}]}, "no place for tools"),
                                   ([{"role": "tool", "content": "x"}], {}, "knows no role tool")):
        with pytest.raises(InvalidRequest, match=why):
            prompt(named, messages, **options)


@pytest.mark.parametrize("template, why", [
    ("{", "is no conversation template"), ("[]", "expected object"), ({"name": "x"}, "required field system"),
    (DOCUMENTED | {"sep_style": "NONE"}, "has the sep_style 'NONE'; known are ADD_COLON_SINGLE,"),
    (DOCUMENTED | {"sep_style": "DOLLY"}, "needs sep2"), (DOCUMENTED | {"stop": "x"}, "unknown field stop"),
    (DOCUMENTED | {"stop_str": 3}, "at \\$.stop_str")])
def test_files_that_are_no_templates(tokenizer: Tokenizer, tmp_path: Path, template: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        chosen(tokenizer, tmp_path, template)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
