"""SGLang's names of chat templates that Baton has no template with tools for, as conversations of text.

The markers, and what a system message says where a chat has none, are those that the models were published with.
"""

from __future__ import annotations

from typing import NamedTuple

from .conversation import ChatTemplate, Conversation, as_jinja

_HELPFUL = "You are a helpful assistant."
_SEES = ("You are a helpful language and vision assistant. You are able to understand the visual content that the user "
         "provides, and assist the user with a variety of tasks using natural language")
_VICUNA = ("A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
           "detailed, and polite answers to the user's questions.")
_INTERNVL = ("你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的"
             "多模态大语言模型。")


class _Format(NamedTuple):
    """``system`` has {} where the system message stands; ``default`` is that of chats without one."""

    style: str
    system: str
    user: str
    assistant: str
    sep: str
    stops: tuple[str, ...]
    default: str = ""
    sep2: str | None = None


_IM_SYSTEM, _IM_USER, _IM_ASSISTANT = (f"<|im_start|>{role}" for role in ("system", "user", "assistant"))
_IM_END, _TURN_END = "<|im_end|>", "<|im_end|>\n"
_LLAMA3_SYSTEM = "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>"
_LLAMA3_STOPS = ("<|end_of_text|>", "<|eot_id|>")
_DEEPSEEK_END = "<｜end▁of▁sentence｜>"


def _im(style: str, default: str = _HELPFUL, stops: tuple[str, ...] = (_IM_END,), *, sep: str = _TURN_END,
        system: str = _IM_SYSTEM + "\n{}", line: str = "") -> _Format:
    """A format with the markers of ChatML; ``line`` ends the roles."""
    return _Format(style, system, _IM_USER + line, _IM_ASSISTANT + line, sep, stops, default)


def _instructions(system: str, *stops: str) -> _Format:
    return _Format("LLAMA2", system, "[INST]", "[/INST]", " ", ("[INST]", "[/INST]", *stops), sep2=" </s><s>")


_FORMATS = {
    "chatml-llava": _im("CHATML", stops=("<|endoftext|>", _IM_END), sep=_IM_END),
    "deepseek-ocr": _Format("ADD_NEW_LINE_SINGLE", "", "", "", "", ()),
    "deepseek-vl2": _Format("DeepSeekVL2", "{}", "<|User|>", "<|Assistant|>", "\n\n", ("User:", _DEEPSEEK_END),
                            sep2=_DEEPSEEK_END),
    "devstral": _instructions("[SYSTEM_PROMPT]\n{}\n[/SYSTEM_PROMPT]\n\n", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "gemma-it": _Format("GEMMA3", "<start_of_turn>user\n{}\n\n", "<start_of_turn>user\n", "<start_of_turn>model\n",
                        "<end_of_turn>\n", ("<end_of_turn>",), _HELPFUL),
    "gme-qwen2-vl": _im("QWEN2_VL_EMBED", stops=("<|endoftext|>",)),
    "internlm2-chat": _im("ADD_COLON_SINGLE", "", (_IM_END, "<|action_end|>"), sep="\n"),
    "internvl-2-5": _im("MPT", _INTERNVL, (_IM_END, "<|action_end|>"), line="\n"),
    "janus-pro": _Format("ADD_COLON_TWO", "{}.", "User", "Assistant", "\n\n", ("<|User|>", _DEEPSEEK_END), _SEES,
                         _DEEPSEEK_END),
    "kimi-vl": _Format("NO_COLON_SINGLE", "<|im_system|>system<|im_middle|>{}", "<|im_user|>user<|im_middle|>",
                       "<|im_assistant|>assistant<|im_middle|>", _IM_END, (_IM_END,), _HELPFUL[:-1]),
    "llama-2": _instructions("[INST] <<SYS>>\n{}\n<</SYS>>\n\n", "<<SYS>>", "<</SYS>>"),
    "llama-4": _Format("LLAMA4", "<|header_start|>system<|header_end|>\n\n{}<|eot|>", "user", "assistant", "",
                       ("<|end_of_text|>", "<|eot|>", "<|eom|>")),
    "llama_3_vision": _Format("LLAMA3", _LLAMA3_SYSTEM, "user", "assistant", "", _LLAMA3_STOPS, _SEES + "."),
    "llava_llama_3": _Format("LLAMA3", _LLAMA3_SYSTEM, "user", "assistant", "", _LLAMA3_STOPS, _SEES + "."),
    "minicpmo": _im("ADD_NEW_LINE_SINGLE", f"You are Qwen, created by Alibaba Cloud. {_HELPFUL}",
                    (_IM_END, "<|endoftext|>")),
    "minicpmv": _im("ADD_NEW_LINE_SINGLE", _HELPFUL[:-1], (_IM_END, "<|endoftext|>"), system=_IM_SYSTEM + "\n{}."),
    "phi-4-mm": _Format("NO_COLON_SINGLE", "{}", "<|user|>", "<|assistant|>", "<|end|>", ("<|end|>",)),
    "points-v15-chat": _im("ADD_NEW_LINE_SINGLE", "", system=""),
    "qwen2-5-o": _im("ADD_NEW_LINE_SINGLE"),
    "qwen2-audio": _im("QWEN2_AUDIO"),
    "qwen2-vl": _im("ADD_NEW_LINE_SINGLE"),
    "vicuna_v1.1": _Format("ADD_COLON_TWO", "{}", "USER", "ASSISTANT", " ", (), _VICUNA, "</s>"),
}
NAMED = frozenset(_FORMATS)


def named_conversation(name: str) -> ChatTemplate:
    """The template called ``name``, which is one of ``NAMED``."""
    form = _FORMATS[name]
    before, _, after = form.system.partition("{}")
    return as_jinja(Conversation(name=name, system=before, user=form.user, assistant=form.assistant,
                                 sep_style=form.style, sep=form.sep, sep2=form.sep2, system_message=form.default,
                                 stop_str=list(form.stops)), after)
