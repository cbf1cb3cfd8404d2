"""A server's own chat template, by its ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..chat_template import ChatTemplate, learn_template
from ..errors import BackendError


def served_template(post: Callable[[str, Any], Any]) -> ChatTemplate | None:
    """The template by the tokens of conversations; None where it cannot be had. ``post(path, body)`` answers as JSON.

    What the tokenizer adds to every text (a token that begins it) is left out: it does so for ``/generate``, too.
    """
    def text(body: dict[str, Any]) -> str:
        tokens = post("/tokenize", body)["tokens"]
        return str(post("/detokenize", {"tokens": tokens, "skip_special_tokens": False})["text"])

    try:
        added = text({"prompt": "x"}).partition("x")[0]

        def render(messages: list[dict[str, Any]], generation: bool) -> str:
            return text({"messages": messages, "add_generation_prompt": generation}).removeprefix(added)

        return learn_template(render)
    except (BackendError, KeyError, TypeError):
        return None
