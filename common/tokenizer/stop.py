"""Stop strings and expressions, matched on a text that arrives in deltas."""

from __future__ import annotations

from collections.abc import Sequence

from .stop_regex import RegexMatcher


class _Automaton:
    """Knuth-Morris-Pratt: ``state`` is the length of the longest end of the text so far that begins ``word``."""

    __slots__ = ("word", "state", "_fallback")

    def __init__(self, word: str):
        self.word = word
        self.state = 0
        self._fallback = [0] * len(word)
        length = 0
        for i in range(1, len(word)):
            while length and word[i] != word[length]:
                length = self._fallback[length - 1]
            if word[i] == word[length]:
                length += 1
            self._fallback[i] = length

    def step(self, char: str) -> int:
        """Take one character; the word's length where it completes the word, else 0."""
        word, state = self.word, self.state
        while state and char != word[state]:
            state = self._fallback[state - 1]
        if char == word[state]:
            state += 1
        self.state = state
        return state if state == len(word) else 0


class StopMatcher:
    """Finds the stop string, or the match of a stop expression, that is completed first (of those that end together,
    the longest).

    Text that may still become one is buffered. The outcome depends on the text alone, never on how it was split into
    deltas. Cost per character: amortized one step per stop string, a bounded number per expression.
    """

    def __init__(self, stops: Sequence[str], trim: bool = True, expressions: Sequence[str] = ()):
        """``trim``: whether what matched is left out of the text. Raises InvalidRequest for an unusable expression."""
        self._automata: list[_Automaton | RegexMatcher] = [*map(_Automaton, stops), *map(RegexMatcher, expressions)]
        self._trim = trim
        self._buffered = ""
        self.matched: str | None = None

    @property
    def may_match(self) -> bool:
        """True where there is anything to find."""
        return bool(self._automata)

    def push(self, text: str) -> str:
        """The text that became certain. After a match (``matched`` is set) further text is dropped."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        text = self._buffered + text
        for i in range(len(self._buffered), len(text)):
            char = text[i]
            length, longest = 0, None
            for automaton in self._automata:
                if (matched := automaton.step(char)) > length:
                    length, longest = matched, automaton
            if longest is not None:
                self.matched = longest.word
                self._buffered = ""
                return text[: i + 1 - (length if self._trim else 0)]
        certain = len(text) - max(automaton.state for automaton in self._automata)
        self._buffered = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The buffered text, at the end of the text."""
        rest, self._buffered = self._buffered, ""
        return rest
