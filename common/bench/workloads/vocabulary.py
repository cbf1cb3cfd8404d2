"""Random tokens to make prompts of."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from ...api.errors import ConfigError, InvalidRequest
from .workload import Prompt


class Tokenizer(Protocol):
    """The part of ``common.tokenizer.Tokenizer`` that prompts use."""

    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_strs(self, ids: Sequence[int]) -> list[str]: ...

    def render_chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None,
                    continue_final_message: bool, options: Mapping[str, Any]) -> str: ...


class Vocabulary:
    """Draws token ids and makes prompts of them, sent as ids or as text."""

    def __init__(self, size: int, tokenizer: Tokenizer | None, *, as_ids: bool):
        """Raises ConfigError where prompts are to be text and there is no tokenizer."""
        if tokenizer is None and not as_ids:
            raise ConfigError("Prompts are sent as text, which takes a tokenizer: name one with --tokenizer, or send "
                              "token ids with --tokenize-prompt.")
        self.size = size
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError where there is none."""
        if self._tokenizer is None:
            raise ConfigError("This data set takes a tokenizer: name one with --tokenizer.")
        return self._tokenizer

    @property
    def has_words(self) -> bool:
        """True where words can be distinguished from other tokens."""
        return self._tokenizer is not None

    @cached_property
    def plain_ids(self) -> list[int]:
        """Ids of ordinary tokens. Without a tokenizer those in the middle: special ids are at either end."""
        if self._tokenizer is None:
            return list(range(min(10, self.size - 1), max(11, self.size * 9 // 10)))
        names = self._tokenizer.token_strs(range(self.size))
        return [i for i, name in enumerate(names) if name and i not in self._tokenizer.special_ids]

    @cached_property
    def word_ids(self) -> list[int]:
        """Ids of whole words with the space before them: their text makes the same tokens again. All plain ones where
        the vocabulary has few words."""
        names = self.tokenizer.token_strs(self.plain_ids)
        words = [i for i, name in zip(self.plain_ids, names)
                 if name[:1] in ("Ġ", "▁", " ") and len(name) > 2 and name[1:].isascii() and name[1:].isalpha()]
        return words if len(words) >= 64 else self.plain_ids

    def draw(self, rng: random.Random, count: int, *, words: bool) -> list[int]:
        return rng.choices(self.word_ids if words else self.plain_ids, k=count)

    def prompt(self, ids: Sequence[int]) -> Prompt:
        if self._as_ids:
            return Prompt(len(ids), ids=list(ids))
        return Prompt(len(ids), text=self.tokenizer.decode(ids, skip_special_tokens=False))

    def prompt_of_text(self, text: str) -> Prompt:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Prompt(len(ids), ids=ids) if self._as_ids else Prompt(len(ids), text=text)

    def chat(self, question: str) -> str:
        """The text of a chat with one question by the tokenizer's template, up to the answer; without the token that
        the server puts before a text. Raises ConfigError where there is no template."""
        try:
            text = self.tokenizer.render_chat([{"role": "user", "content": question}], tools=None,
                                              continue_final_message=False, options={})
        except InvalidRequest as error:
            raise ConfigError(f"--apply-chat-template: {error}") from None
        if self._as_ids:
            return text
        first = self.tokenizer.decode(self.tokenizer.encode("")[:1], skip_special_tokens=False)
        return text.removeprefix(first)
