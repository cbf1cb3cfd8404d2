"""The prompt at the beginning of a completion's answer (``echo``)."""

from __future__ import annotations

from collections.abc import Sequence

from ...tokenizer.tokenizer import Tokenizer
from ..context.generation import Choice
from ..protocol.prompts import Prompts


class Echo:
    """Echoes each choice's prompt once: the text that the client sent, or the text of its tokens."""

    def __init__(self, prompts: Prompts, choices_each: int, tokenizer: Tokenizer):
        """``choices_each``: choices of one prompt, which follow each other."""
        self._prompts = prompts
        self._choices_each = choices_each
        self._tokenizer = tokenizer
        self._echoed: set[int] = set()

    def start(self, choices: Sequence[Choice]) -> None:
        """Notes choices that continue another server's output: their prompts were echoed there."""
        self._echoed = {choice.index for choice in choices if choice.num_output_tokens}

    def take(self, choice: Choice) -> str | None:
        """The prompt's text the first time, then None."""
        if choice.index in self._echoed:
            return None
        self._echoed.add(choice.index)
        return self.text(choice)

    def text(self, choice: Choice) -> str:
        """The text of the choice's prompt."""
        prompt = choice.index // self._choices_each
        if self._prompts.texts is not None:
            return self._prompts.texts[prompt]
        assert self._prompts.ids is not None
        return self._tokenizer.decode(self._prompts.ids[prompt], skip_special_tokens=False)
