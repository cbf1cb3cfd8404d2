"""Prompts of code models that fill in what belongs between a prompt and its suffix."""

from __future__ import annotations

from ...api.errors import InvalidRequest
from ...config.completion_templates import COMPLETION_TEMPLATES
from ..protocol.prompts import Prompts
from .schema import CompletionRequest


def with_suffix(body: CompletionRequest, prompts: Prompts, template: str | None) -> Prompts:
    """Returns the prompts that ask for the text between each of ``prompts`` and the request's suffix, by the server's
    ``--completion-template``; raises InvalidRequest."""
    if not body.suffix:
        return prompts
    if template is None:
        raise InvalidRequest("suffix is for servers of code models that were started with --completion-template.",
                             param="suffix")
    if prompts.texts is None:
        raise InvalidRequest("suffix goes with a prompt that is text, not token ids.", param="suffix")
    if body.echo:
        raise InvalidRequest("suffix does not go with echo: leave out either.", param="suffix")
    written = COMPLETION_TEMPLATES[template]
    return Prompts(texts=[written.format(prefix=text, suffix=body.suffix) for text in prompts.texts],
                   batched=prompts.batched)
