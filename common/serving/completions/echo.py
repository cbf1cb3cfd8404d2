"""The prompt at the beginning of a completion's answer (``echo``)."""

from __future__ import annotations

from collections.abc import Sequence

from ...tokenizer.tokenizer import Tokenizer
from ..generation import Choice
from ..protocol.prompts import Prompts


class Echo:
    """Prompts as their choices tell them, once each: the text that the client sent, or what its tokens stand for."""

    def __init__(self, prompts: Prompts, choices_each: int, tokenizer: Tokenizer):
        """``choices_each``: choices of one prompt, which follow each other."""
        self._prompts = prompts
        self._choices_each = choices_each
        self._tokenizer = tokenizer
        self._told: set[int] = set()

    def begin(self, choices: Sequence[Choice]) -> None:
        """A choice that goes on behind another server's output was told there."""
        self._told = {choice.index for choice in choices if choice.num_output_tokens}

    def take(self, choice: Choice) -> str | None:
        """The prompt's text, None where it was told before."""
        if choice.index in self._told:
            return None
        self._told.add(choice.index)
        return self.text(choice)

    def text(self, choice: Choice) -> str:
        prompt = choice.index // self._choices_each
        if self._prompts.texts is not None:
            return self._prompts.texts[prompt]
        assert self._prompts.ids is not None
        return self._tokenizer.decode(self._prompts.ids[prompt], skip_special_tokens=False)
