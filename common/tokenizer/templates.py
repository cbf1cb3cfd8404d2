"""Chat templates by name and from files."""

from __future__ import annotations

from pathlib import Path

from ..api.errors import ConfigError
from .conversation import ChatTemplate, conversation_template, is_conversation
from .named_conversations import NAMED, named_conversation

_FOLDER = Path(__file__).parent / "chat_templates"
_STOPS = {"chatml": ("<|im_end|>", "<|endoftext|>")}
"""Stops of templates whose checkpoints may not know that their markers end an answer."""


def shipped() -> list[str]:
    """Names of the templates that come with Baton."""
    return sorted({*(path.stem for path in _FOLDER.glob("*.jinja")), *NAMED})


def check_template(name: str) -> None:
    """Raises ConfigError for a template that cannot be read or parsed, before a tokenizer is loaded."""
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(load_template(name).source)
    except jinja2.TemplateSyntaxError as error:
        if "unknown tag" not in (error.message or ""):  # transformers knows further ones
            raise ConfigError(f"--chat-template {name} is not valid jinja: line {error.lineno}, "
                              f"{error.message}.") from None


def load_template(name: str) -> ChatTemplate:
    """A shipped template, or that of the jinja or JSON file at ``name``; raises ConfigError."""
    if name in NAMED:
        return named_conversation(name)
    path = _FOLDER / f"{name}.jinja" if name in shipped() else Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"Cannot read --chat-template {name}: {reason}; give a jinja or JSON file, or one of "
                          f"{', '.join(shipped())}.") from None
    return conversation_template(name, text) if is_conversation(name, text) else ChatTemplate(
        text, _STOPS.get(name, ()))
