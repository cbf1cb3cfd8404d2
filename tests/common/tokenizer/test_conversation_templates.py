"""SGLang's JSON chat templates: each separator style's prompt, their stops, and files that are none."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from baton.common.api.errors import ConfigError, InvalidRequest
from baton.common.tokenizer.named_conversations import NAMED
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
    "QWEN2_VL_EMBED": "Y\nS/U\na/A\nb/U\nc/A\n!",
    "CHATGLM3": "Y\nSU\naA\nbU\ncA", "DEEPSEEK_CHAT": "Y\nSU: a/A: b|U: c/A:",
    "METAMATH": "Y\nS/U:\na/A: |bU:\nc/A: |", "DeepSeekVL2": "Y\nS/U: a/A: b|U: c/A:",
    "QWEN2_AUDIO": "Y\nS/U\na/A\nb/U\nc/A\n", "GEMMA3": "Y\nSa/Ab/Uc/A", "MPT": "Y\nS/Ua/Ab/Uc/A",
}

HELPFUL, SEES, IM = "You are a helpful assistant", "You are a helpful language and vision assistant. ", "<|im_start|>"
IM_TALK = "{0}user\na<|im_end|>\n{0}assistant\nb<|im_end|>\n{0}user\nc<|im_end|>\n{0}assistant\n".replace("{0}", IM)
CHATML = f"{IM}system\n{HELPFUL}.<|im_end|>\n" + IM_TALK
LLAMA3 = ("<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nb"
          "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
          "<|start_header_id|>assistant<|end_header_id|>\n\n")
NAMED_PROMPTS = {  # SGLang's of TALK without its system message: the beginning, and the end
    "chatml": (CHATML, ""), "chatml-llava": (CHATML, ""), "qwen2-vl": (CHATML, ""), "qwen2-5-o": (CHATML, ""),
    "qwen2-audio": (CHATML, ""), "gme-qwen2-vl": (CHATML + "<|endoftext|>", ""), "points-v15-chat": (IM_TALK, ""),
    "minicpmv": (CHATML, ""),
    "minicpmo": (f"{IM}system\nYou are Qwen, created by Alibaba Cloud. {HELPFUL}.<|im_end|>\n{IM_TALK}", ""),
    "internvl-2-5": (f"{IM}system\n你是书生·万象", "语言模型。<|im_end|>\n" + IM_TALK),
    "internlm2-chat": (f"{IM}system\n\n{IM}user: a\n{IM}assistant: b\n{IM}user: c\n{IM}assistant:", ""),
    "llama-2": ("[INST] a [/INST] b </s><s>[INST] c [/INST]", ""),
    "devstral": ("[INST] a [/INST] b </s><s>[INST] c [/INST]", ""),
    "llama-4": ("<|header_start|>user<|header_end|>\n\na<|eot|><|header_start|>assistant<|header_end|>\n\nb<|eot|>"
                "<|header_start|>user<|header_end|>\n\nc<|eot|><|header_start|>assistant<|header_end|>\n\n", ""),
    "llama_3_vision": (f"<|start_header_id|>system<|end_header_id|>\n\n{SEES}", "natural language.<|eot_id|>" + LLAMA3),
    "llava_llama_3": (f"<|start_header_id|>system<|end_header_id|>\n\n{SEES}", "natural language.<|eot_id|>" + LLAMA3),
    "vicuna_v1.1": ("A chat between a curious user", "questions. USER: a ASSISTANT: b</s>USER: c ASSISTANT:"),
    "phi-4-mm": ("<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>", ""),
    "deepseek-vl2": ("<|User|>: a\n\n<|Assistant|>: b<｜end▁of▁sentence｜><|User|>: c\n\n<|Assistant|>:", ""),
    "deepseek-ocr": ("\na\nb\nc\n", ""),
    "janus-pro": (SEES, "natural language.\n\nUser: a\n\nAssistant: b<｜end▁of▁sentence｜>User: c\n\nAssistant:"),
    "gemma-it": (f"<start_of_turn>user\n{HELPFUL}.\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
                 "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n", ""),
    "kimi-vl": (f"<|im_system|>system<|im_middle|>{HELPFUL}<|im_user|>user<|im_middle|>a<|im_end|>"
                "<|im_assistant|>assistant<|im_middle|>b<|im_end|><|im_user|>user<|im_middle|>c<|im_end|>"
                "<|im_assistant|>assistant<|im_middle|>", ""),
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
    template = {"name": "x", "system": "Y", "user": "U", "assistant": "A", "sep_style": style, "sep": "/", "sep2": "|",
                "stop_str": "!"}
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


@pytest.mark.parametrize("name", sorted(NAMED_PROMPTS))
def test_names_of_sglang(tokenizer: Tokenizer, name: str) -> None:
    begin, end = NAMED_PROMPTS[name]
    text = prompt(tokenizer.with_chat_template(name), TALK[1:])
    assert (text.startswith(begin) and text.endswith(end)) if end else text == begin


def test_names_with_a_system_message(tokenizer: Tokenizer) -> None:
    assert NAMED_PROMPTS.keys() - {"chatml"} == NAMED
    ours = tokenizer.with_chat_template("llama-2")
    assert prompt(ours, TALK) == "[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]"
    assert ours.chat_stops(300)[0] == ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")
    assert prompt(tokenizer.with_chat_template("vicuna_v1.1"), TALK[:2]) == "S USER: a ASSISTANT:"
    assert tokenizer.with_chat_template("chatml").chat_stops(300)[0] == ("<|im_end|>", "<|endoftext|>")


def test_prompts_begin_as_the_tokenizers_texts(tokenizer: Tokenizer) -> None:
    """SGLang tokenizes a conversation like any text: with the token that a Llama begins texts with."""
    hf = copy.deepcopy(tokenizer._hf)
    hf.add_special_tokens({"bos_token": "<bos>"})
    hf._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", hf.bos_token_id)])
    assert prompt(Tokenizer(hf).with_chat_template("llama-2"), TALK[1:2]) == "<bos>[INST] a [/INST]"
