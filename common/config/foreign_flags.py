"""Flags of other servers on our command lines: dropped where they ask for what is done anyway, translated to flags of
ours, or refused with a reason.

Flags of the same meaning are ours, under the same name. A table has the others, so that a script that was written for
the other server either does here what it did there, or fails at once with a sentence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..api.errors import ConfigError

Count = Literal["0", "1", "?", "*"]
"""Values after a flag: none, one, at most one, any number."""


@dataclass(frozen=True)
class Automatic:
    """A flag that is dropped: it is not needed, because of ``reason``."""

    reason: str
    count: Count = "0"


@dataclass(frozen=True)
class Refused:
    """A flag that is not supported, because of ``reason``, which says what to use instead where there is something.
    It is dropped with one of the ``harmless`` values, which ask for what is so anyway."""

    reason: str
    harmless: tuple[str, ...] = ()
    count: Count = "1"


@dataclass(frozen=True)
class Mapped:
    """A flag that sets flags of ours: ``to`` gets its values and those of our flags, by the names of their fields, and
    returns the flags to set. ``becomes`` describes them. Raises ConfigError."""

    to: Callable[[Sequence[str], Mapping[str, Any]], Mapping[str, Any]]
    becomes: str
    count: Count = "0"


Foreign = Automatic | Refused | Mapped


@dataclass(frozen=True)
class Values:
    """Values of a flag that both servers have, which are others here or refused with a reason."""

    to: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """A mapped flag in a command line or file."""

    name: str
    flag: Mapped
    values: tuple[str, ...]


@dataclass(frozen=True)
class ForeignFlags:
    """The flags of another server that differ from ours, by their names (``--enable-metrics``)."""

    flags: Mapping[str, Foreign]
    values: Mapping[str, Values] = field(default_factory=dict)
    abbreviates: bool = False
    """True if the other server takes the beginning of a name for the name."""

    def split(self, argv: Sequence[str], own: Collection[str], prog: str) -> tuple[list[str], list[Given]]:
        """Splits a command line into our flags, with their values, and the mapped ones; reports each other flag on
        stderr. ``own`` are the names of our flags. Raises ConfigError for flags and values that are refused."""
        ours: list[str] = []
        mapped: list[Given] = []
        index = 0
        while index < len(argv):
            word = argv[index]
            index += 1
            name, joined, value = word.partition("=")
            name = self.spelling(name, own)
            known = self.flags.get(name)
            if known is None:
                ours.append(f"{name}={self.value(name, value, prog)}" if joined else name)
                if name in self.values and not joined and index < len(argv):
                    ours.append(self.value(name, argv[index], prog))
                    index += 1
                continue
            values = (value,) if joined else _take(argv, index, known.count)
            index += 0 if joined else len(values)
            mapped.extend(self._judge(name, known, values, prog))
        return ours, mapped

    def spelling(self, word: str, own: Collection[str]) -> str:
        """The name that ``word`` means: with dashes, and in full."""
        if not word.startswith("--") or word in own or word in self.flags:
            return word
        name = word.replace("_", "-")
        if name in own or name in self.flags or not self.abbreviates:
            return name if name in own or name in self.flags else word
        longer = [each for each in (*own, *self.flags) if each.startswith(name)]
        return longer[0] if len(longer) == 1 else word

    def value(self, name: str, value: str, prog: str) -> str:
        """Our value of a flag that both servers have; raises ConfigError where it is refused."""
        values = self.values.get(name, Values())
        if value in values.refused:
            raise ConfigError(f"{name} {value} is not supported: {values.refused[value]}.")
        if value not in values.to:
            return value
        _report(f"{prog}: {name} {value} is {name} {values.to[value]} here.")
        return values.to[value]

    def entry(self, name: str, value: Any, prog: str) -> list[Given]:
        """A foreign flag in a configuration file; as ``split``. False and null mean that it is not given."""
        if value is None or value is False:
            return []
        values = () if value is True else words_of(value)
        return self._judge(name, self.flags[name], values, prog)

    def _judge(self, name: str, flag: Foreign, values: tuple[str, ...], prog: str) -> list[Given]:
        if flag.count == "1" and len(values) != 1 and not isinstance(flag, Refused):
            raise ConfigError(f"{name} takes one value.")
        if isinstance(flag, Mapped):
            return [Given(name, flag, values)]
        if isinstance(flag, Automatic):
            _report(f"{prog}: {name} is not needed: {flag.reason}.")
        elif not values or any(value not in flag.harmless for value in values):
            shown = " ".join((name, *values)) if flag.harmless else name
            raise ConfigError(f"{shown} is not supported: {flag.reason}.")
        return []


def _take(argv: Sequence[str], index: int, count: Count) -> tuple[str, ...]:
    """The values of a flag in ``argv`` from ``index`` on."""
    if count in "01":
        return tuple(argv[index:index + int(count)])
    end = index
    while end < len(argv) and not argv[end].startswith("--") and (count == "*" or end == index):
        end += 1
    return tuple(argv[index:end])


def words_of(value: Any) -> tuple[str, ...]:
    """The words that a value of a configuration file is on a command line: an object is JSON."""
    if isinstance(value, list):
        return tuple(word for item in value for word in words_of(item))
    return (json.dumps(value) if isinstance(value, dict) else str(value),)


def report_mapping(given: Given, words: Sequence[str], prog: str) -> None:
    """Reports on stderr the flags of ours that a flag became."""
    theirs = " ".join((given.name, *given.values))
    if (ours := " ".join(words)) != theirs:
        _report(f"{prog}: {theirs} is {ours or 'not needed'} here.")


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
