"""SGLang's JSON form of a chat template (FastChat's conversation), as jinja.

The form has the prefix of each role and the separators of messages; ``sep_style`` says how they are combined.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import msgspec

from ..api.errors import ConfigError


class _Style(NamedTuple):
    """Jinja expressions for the prompt's beginning, a message, and the answer's beginning. Their variables are
    ``system`` (the formatted system message) and ``given`` (its content), ``role`` and ``text``, ``sep`` and ``sep2``,
    ``end`` (alternately one of these), ``stop`` (the first stop string), ``i`` (messages before this one), ``even`` and
    ``tag`` (the speaker's tag)."""

    begin: str
    message: str
    answer: str


_PLAIN, _LINE, _WHERE_GIVEN = "system", "system + sep", "system if given else ''"
_LINE_IF_ANY = "system + sep if system else ''"
_HEADER = "'<|start_header_id|>' + role + '<|end_header_id|>\\n\\n'"
_HEADER4 = "'<|header_start|>' + role + '<|header_end|>\\n\\n'"
_ROUND = "('[Round ' ~ (i // 2 + first_round) ~ ']' ~ sep if even else '') ~ role ~ '\uff1a'"
_BEGUN = "('<s>' if even else '') + role + ':'"
_STEP = "role + (':\\n' if even else ': ' + sep2)"
_STYLES = {
    "ADD_COLON_SINGLE": _Style(_LINE, "role + ': ' + text + sep", "role + ':'"),
    "ADD_COLON_TWO": _Style(_LINE, "role + ': ' + text + end", "role + ':'"),
    "ADD_COLON_SPACE_SINGLE": _Style(_LINE, "role + ': ' + text + sep", "role + ': '"),
    "NO_COLON_SINGLE": _Style(_PLAIN, "role + text + sep", "role"),
    "NO_COLON_TWO": _Style(_PLAIN, "role + text + end", "role"),
    "ADD_NEW_LINE_SINGLE": _Style(_LINE_IF_ANY, "role + '\\n' + text + sep", "role + '\\n'"),
    "LLAMA2": _Style("system if given else '[INST] '", "text + ' ' if i == 0 else tag + ' ' + text + end", "tag"),
    "LLAMA3": _Style(_WHERE_GIVEN, f"{_HEADER} + text.strip() + '<|eot_id|>'", _HEADER),
    "LLAMA4": _Style(_WHERE_GIVEN, f"{_HEADER4} + text.strip() + '<|eot|>'", _HEADER4),
    "CHATGLM": _Style(_LINE_IF_ANY, f"{_ROUND} ~ text ~ sep", _ROUND),
    "CHATML": _Style("system + sep + '\\n' if system else ''", "role + '\\n' + text + sep + '\\n'", "role + '\\n'"),
    "CHATINTERN": _Style(_PLAIN, f"{_BEGUN} + text + end + '\\n'", _BEGUN),
    "DOLLY": _Style(_PLAIN, "role + ':\\n' + text + end + ('' if even else '\\n\\n')", "role + ':\\n'"),
    "RWKV": _Style(_PLAIN, "role + ': ' + text.replace('\\r\\n', '\\n').replace('\\n\\n', '\\n') + '\\n\\n'",
                   "role + ':'"),
    "PHOENIX": _Style(_PLAIN, "role + ': <s>' + text + '</s>'", "role + ': <s>'"),
    "ROBIN": _Style(_LINE, "role + ':\\n' + text + sep", "role + ':\\n'"),
    "FALCON_CHAT": _Style("system + sep if given else ''", "role + ': ' + text + sep", "role + ':'"),
    "CHATGLM3": _Style(_WHERE_GIVEN, "role + '\\n' + text", "role"),
    "DEEPSEEK_CHAT": _Style(_PLAIN, "role + ': ' + text + end", "role + ':'"),
    "METAMATH": _Style(_LINE_IF_ANY, f"{_STEP} + text + (sep if even else '')", _STEP),
    "DeepSeekVL2": _Style(_LINE_IF_ANY, "role + ': ' + text + end", "role + ':'"),
    "QWEN2_AUDIO": _Style(_LINE_IF_ANY, "role + '\\n' + text + sep", "role + '\\n'"),
    "QWEN2_VL_EMBED": _Style(_LINE_IF_ANY, "role + '\\n' + text + sep", "role + '\\n' + stop"),
    "GEMMA3": _Style(_PLAIN, "text + sep if i == 0 else role + text + sep", "role"),
    "MPT": _Style(_LINE, "role + text + sep", "role"),
}
_SOURCE = """\
{{%- set sep, sep2, stop, roles, first_round = {sep}, {sep2}, {stop}, [{user}, {assistant}], {first_round} -%}}
{{%- set at = namespace(given={system_message}, i=0) -%}}
{{%- if tools -%}}{{{{ raise_exception('A conversation template has no place for tools.') }}}}{{%- endif -%}}
{{%- for message in messages if message.role in ('system', 'developer') -%}}
{{%- set at.given = message.content -%}}{{%- endfor -%}}
{{%- set given = at.given -%}}{{%- set system = {system} + given + {system_end} -%}}
{{{{- {begin} -}}}}
{{%- for message in messages if message.role not in ('system', 'developer') -%}}
{{%- if message.role not in ('user', 'assistant') -%}}
{{{{ raise_exception('A conversation template knows no role ' ~ message.role ~ '.') }}}}{{%- endif -%}}
{{%- set i, even, text = at.i, at.i % 2 == 0, message.content -%}}
{{%- set role, tag = roles[0 if message.role == 'user' else 1], roles[i % 2] -%}}
{{%- set end = sep if even else sep2 -%}}{{%- set at.i = i + 1 -%}}
{{{{- {message} -}}}}{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{%- set i, even, role, tag = at.i, at.i % 2 == 0, roles[1], roles[at.i % 2] -%}}
{{{{- {answer} -}}}}{{%- endif -%}}"""


class Conversation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A template in SGLang's form; ``system`` comes before the system message."""

    name: str
    system: str
    user: str
    assistant: str
    sep_style: str
    sep: str = "\n"
    sep2: str | None = None
    system_message: str = ""
    stop_str: str | list[str] | None = None


class ChatTemplate(NamedTuple):
    """A template's jinja source, strings that end an answer by it, and whether the tokenizer adds what it begins every
    text with."""

    source: str
    stops: tuple[str, ...] = ()
    begins_as_text: bool = False


def is_conversation(name: str, text: str) -> bool:
    """True where a template's file is SGLang's JSON form, not jinja."""
    if name.endswith(".json"):
        return True
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def conversation_template(name: str, text: str) -> ChatTemplate:
    """The template that a JSON file describes; raises ConfigError."""
    try:
        conversation = msgspec.json.decode(text, type=Conversation)
    except msgspec.DecodeError as error:
        what = str(error).replace("`", "")
        what = what[:1].lower() + what[1:]
        raise ConfigError(f"--chat-template {name} is no conversation template: {what}.") from None
    style = _STYLES.get(conversation.sep_style)
    if style is None:
        raise ConfigError(f"--chat-template {name} has the sep_style {conversation.sep_style!r}; known are "
                          f"{', '.join(_STYLES)}.")
    needs_both = any(word in expression for expression in style for word in ("end", "sep2"))
    if conversation.sep2 is None and needs_both:
        raise ConfigError(f"--chat-template {name}: the sep_style {conversation.sep_style} needs sep2, which ends an "
                          "answer, in addition to sep.")
    conversation.system += "\n"
    return as_jinja(conversation)


def as_jinja(conversation: Conversation, system_end: str = "") -> ChatTemplate:
    """The template of a conversation whose style is known; ``system_end`` follows the system message."""
    stops = [conversation.stop_str] if isinstance(conversation.stop_str, str) else conversation.stop_str or []
    names = ("sep", "user", "assistant", "system", "system_message")
    source = _SOURCE.format(**{field: _literal(getattr(conversation, field)) for field in names},
                            **_STYLES[conversation.sep_style]._asdict(), sep2=_literal(conversation.sep2 or ""),
                            stop=_literal(stops[0] if stops else ""), system_end=_literal(system_end),
                            first_round=int(conversation.name == "chatglm2"))
    return ChatTemplate(source, tuple(filter(None, stops)), begins_as_text=True)


def _literal(text: str) -> str:
    """A string literal of jinja."""
    return json.dumps(text, ensure_ascii=False)
