"""The text around each role's turn: by name, or learned from what a server renders."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import ProgramError


@dataclass(frozen=True)
class ChatTemplate:
    """Per role what its turn begins and ends with.

    ``opening`` comes before a conversation whose first turn is not the system's (a default system prompt);
    ``after_system`` replaces what a user's turn right after the system's begins with, where a format joins the two.
    """

    turns: dict[str, tuple[str, str]]
    opening: str = ""
    after_system: str | None = None
    stop: tuple[str, ...] = field(default=())

    def begin(self, role: str, before: str | None) -> str:
        """Returns what begins a turn of ``role`` after one of ``before`` (None: the first). Raises ProgramError."""
        if role not in self.turns:
            raise ProgramError(f"The chat template has no role {role}: use one of {', '.join(self.turns)}.")
        opening = self.opening if before is None and role != "system" else ""
        joined = role == "user" and before == "system" and self.after_system is not None
        return opening + (self.after_system or "" if joined else self.turns[role][0])

    def end(self, role: str) -> str:
        return self.turns[role][1]


def _alike(pattern: str, end: str, *, system: str = "system", assistant: str = "assistant",
           opening: str = "") -> ChatTemplate:
    """A format whose turns differ in the role's name alone."""
    names = {"system": system, "user": "user", "assistant": assistant}
    stop = (end.strip(),) if end.strip() else ()
    return ChatTemplate({role: (pattern.format(name), end) for role, name in names.items()}, opening, stop=stop)


_CHATML = _alike("<|im_start|>{}\n", "<|im_end|>\n")
TEMPLATES = {
    "default": ChatTemplate({"system": ("SYSTEM:", "\n"), "user": ("USER:", "\n"), "assistant": ("ASSISTANT:", "\n")}),
    "chatml": _CHATML,
    "qwen": _alike("<|im_start|>{}\n", "<|im_end|>\n",
                   opening="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"),
    "llama-3-instruct": _alike("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama-4": _alike("<|header_start|>{}<|header_end|>\n\n", "<|eot|>"),
    "llama-2-chat": ChatTemplate({"system": ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n"), "user": ("[INST] ", " [/INST]"),
                                  "assistant": ("", " </s><s>")}, after_system="", stop=("[INST]", "<<SYS>>")),
    "mistral": ChatTemplate({"system": ("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"), "user": ("[INST] ", " [/INST]"),
                             "assistant": ("", "</s>")}, stop=("</s>",)),
    "gemma-it": ChatTemplate({"system": ("", ""), "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
                              "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n")}, stop=("<end_of_turn>",)),
    "deepseek-v3": ChatTemplate({"system": ("", ""), "user": ("<｜User｜>", ""),
                                 "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")},
                                stop=("<｜end▁of▁sentence｜>",)),
    "vicuna_v1.1": ChatTemplate({"system": ("", " "), "user": ("USER:", " "), "assistant": ("ASSISTANT:", "</s>")},
                                opening="A chat between a curious user and an artificial intelligence assistant. The "
                                        "assistant gives helpful, detailed, and polite answers to the user's "
                                        "questions. "),
}
"""By SGLang's names."""

_BY_MODEL = (("vicuna", "vicuna_v1.1"), ("llama-?4", "llama-4"), ("llama-?2.*chat", "llama-2-chat"),
             ("llama-?3.*instruct|llama-?guard", "llama-3-instruct"), ("deepseek-(v3|r1)", "deepseek-v3"),
             ("mistral|mixtral", "mistral"), ("gemma.*it", "gemma-it"), ("qwen.*(chat|instruct)|qwen3", "qwen"),
             ("tinychat|yi-.*chat|hermes|chatml", "chatml"))


def template_named(name: str) -> ChatTemplate:
    """The template of a name; raises ProgramError for another one."""
    if name not in TEMPLATES:
        raise ProgramError(f"chat_template_name {name} is not known: use one of {', '.join(sorted(TEMPLATES))}.")
    return TEMPLATES[name]


def template_of_model(model_path: str) -> ChatTemplate:
    """The template that the model's name suggests, else ``default``."""
    found = (name for pattern, name in _BY_MODEL if re.search(pattern, model_path, re.IGNORECASE))
    return TEMPLATES[next(found, "default")]


_MARKS = {"system": "Mark-of-system", "user": "Mark-of-user", "assistant": "Mark-of-answer"}


def learn_template(render: Callable[[list[dict[str, Any]], bool], str]) -> ChatTemplate | None:
    """The template by which ``render(messages, add_generation_prompt)`` writes conversations.

    None where its turns are not text before and after the content alone (a system prompt inside the user's turn, say).
    """
    def says(*roles: str, prompt: bool = False) -> str:
        return render([{"role": role, "content": _MARKS[role]} for role in roles], prompt)

    alone, dialogue = says("user"), says("user", "assistant", "user")
    user_end = alone.partition(_MARKS["user"])[2]
    assistant_begin = says("user", prompt=True)[len(alone):]
    between = dialogue.partition(_MARKS["assistant"])[2].partition(_MARKS["user"])[0]
    assistant_end = says("user", "assistant").partition(_MARKS["assistant"])[2]
    user_begin = between[len(assistant_end):]
    system_begin, _, rest = says("system", "user").partition(_MARKS["system"])
    system_end = rest.partition(_MARKS["user"])[0].removesuffix(user_begin)
    template = ChatTemplate(
        {"system": (system_begin, system_end), "user": (user_begin, user_end),
         "assistant": (assistant_begin, assistant_end)},
        opening=alone.partition(_MARKS["user"])[0].removesuffix(user_begin),
        stop=(assistant_end.strip(),) if assistant_end.strip() else ())
    roles = ("system", "user", "assistant", "user")
    return template if _write(template, roles) == says(*roles) and _write(template, roles[1:]) == dialogue else None


def _write(template: ChatTemplate, roles: tuple[str, ...]) -> str:
    before = (None, *roles)
    return "".join(template.begin(role, last) + _MARKS[role] + template.end(role) for role, last in zip(roles, before))
