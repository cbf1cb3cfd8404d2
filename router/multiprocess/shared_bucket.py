"""A rate that all processes of a router keep together."""

from __future__ import annotations

from ..admission.admission import TokenBucket


class SharedBucket(TokenBucket):
    """A bucket on the board: two doubles, of which the second is 0 until somebody fills it."""

    __slots__ = ("_words", "_at_word")

    def __init__(self, rate: float, now: float, words: memoryview[float], at: int):
        self._words = words
        self._at_word = at
        level, since = words[at], words[at + 1]
        super().__init__(rate, now)
        if since:
            self._level, self._at = level, since

    def _get_level(self) -> float:
        return self._words[self._at_word]

    def _set_level(self, level: float) -> None:
        self._words[self._at_word] = level

    def _get_at(self) -> float:
        return self._words[self._at_word + 1]

    def _set_at(self, at: float) -> None:
        self._words[self._at_word + 1] = at

    _level = property(_get_level, _set_level)  # type: ignore[assignment]
    _at = property(_get_at, _set_at)  # type: ignore[assignment]
