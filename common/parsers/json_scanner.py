"""An incremental scanner of JSON: finds a value's end, or the first character that is not JSON."""

from __future__ import annotations

import re

_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_IN_WORD = re.compile(r"[-+.0-9a-zA-Z]*")
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_CLOSERS = {"{": "}", "[": "]"}


class JsonScanner:
    """Scans one value. ``done`` once it is complete, ``wrong`` at a character that JSON does not allow there.

    Amortized constant time per character. A number or word is complete with the character that follows it.
    """

    def __init__(self) -> None:
        self.done = False
        self.wrong = False
        self._closers: list[str] = []
        self._state = self._value
        self._word = ""
        self._is_key = False
        self._hex = 0
        self._may_close = False  # directly after an opening bracket

    def feed(self, text: str, pos: int) -> int:
        """Scans from ``text[pos]``; returns the position after the last character that belongs to the value."""
        while pos < len(text) and not self.done and not self.wrong:
            pos = self._state(text, pos)
        return pos

    def _value(self, text: str, pos: int) -> int:
        pos = _SPACE.match(text, pos).end()  # type: ignore[union-attr]
        char = text[pos: pos + 1]
        if not char:
            return pos
        if char == "]" and self._may_close and self._closers[-1] == "]":
            return self._close(pos)
        self._may_close = False
        if char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
            self._state, self._may_close = (self._key if char == "{" else self._value), True
        elif char == '"':
            self._state, self._is_key = self._string, False
        elif char == "-" or char.isdigit() or char in "tfn":
            self._state, self._word = self._in_word, ""
            return pos
        else:
            self.wrong = True
            return pos
        return pos + 1

    def _key(self, text: str, pos: int) -> int:
        pos = _SPACE.match(text, pos).end()  # type: ignore[union-attr]
        char = text[pos: pos + 1]
        if not char:
            return pos
        if char == "}" and self._may_close:
            return self._close(pos)
        self._may_close = False
        if char != '"':
            self.wrong = True
            return pos
        self._state, self._is_key = self._string, True
        return pos + 1

    def _string(self, text: str, pos: int) -> int:
        pos = _IN_STRING.match(text, pos).end()  # type: ignore[union-attr]
        char = text[pos: pos + 1]
        if char == "\\":
            self._state = self._escape
        elif char == '"':
            self._state = self._colon if self._is_key else self._after
            self.done = not self._closers
        elif char:
            self.wrong = True
            return pos
        return pos + len(char)

    def _escape(self, text: str, pos: int) -> int:
        if text[pos] == "u":
            self._state, self._hex = self._unicode, 4
        elif text[pos] in '"\\/bfnrt':
            self._state = self._string
        else:
            self.wrong = True
            return pos
        return pos + 1

    def _unicode(self, text: str, pos: int) -> int:
        if text[pos] not in "0123456789abcdefABCDEF":
            self.wrong = True
            return pos
        self._hex -= 1
        if not self._hex:
            self._state = self._string
        return pos + 1

    def _in_word(self, text: str, pos: int) -> int:
        end = _IN_WORD.match(text, pos).end()  # type: ignore[union-attr]
        self._word += text[pos:end]
        if end < len(text):
            self.wrong = not _WORD.fullmatch(self._word)
            self._state = self._after
            self.done = not self._closers and not self.wrong
        return end

    def _colon(self, text: str, pos: int) -> int:
        pos = _SPACE.match(text, pos).end()  # type: ignore[union-attr]
        char = text[pos: pos + 1]
        self.wrong = bool(char) and char != ":"
        if char == ":":
            self._state = self._value
            return pos + 1
        return pos

    def _after(self, text: str, pos: int) -> int:
        pos = _SPACE.match(text, pos).end()  # type: ignore[union-attr]
        char = text[pos: pos + 1]
        if not char:
            return pos
        if char == self._closers[-1]:
            return self._close(pos)
        if char != ",":
            self.wrong = True
            return pos
        self._state = self._key if self._closers[-1] == "}" else self._value
        return pos + 1

    def _close(self, pos: int) -> int:
        self._closers.pop()
        self._state, self._may_close = self._after, False
        self.done = not self._closers
        return pos + 1
