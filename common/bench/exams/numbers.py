"""Numbers that answers end with."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def number_in(text: str) -> str | None:
    """The first number after ``####``, else the text's last one: the same text for equal numbers (``1,200.0`` is
    ``1200``). None where there is none."""
    _, marked, after = text.partition("####")
    numbers = _NUMBER.findall(after if marked else text)
    if not numbers:
        return None
    return format(Decimal(numbers[0 if marked else -1].replace(",", "")).normalize(), "f")
