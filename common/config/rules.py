"""Rules on combinations of flags: each is data in the section of its feature, next to the flags.

A section of a configuration has ``flag_rules``, on the whole configuration, and ``own_flag_rules``, on itself alone,
for commands that take the section without the others. The ranges of single flags are no rules: ``at_least``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..api.errors import ConfigError

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class Rule(Generic[C]):
    """Refuses configurations to which it ``applies`` with the ``sentence``, which says what to change.

    ``{section.flag}`` in the sentence, in a rule on one section ``{flag}``, is the flag's value.
    """

    applies: Callable[[C], object]
    sentence: str

    def check(self, config: C) -> None:
        """Raises ConfigError where the rule applies."""
        if self.applies(config):
            names = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
            raise ConfigError(self.sentence.format(**{name: getattr(config, name) for name in names}))


if TYPE_CHECKING:
    from .server import ServerConfig

    ServerRule = Rule[ServerConfig]
else:
    ServerRule = Rule  # a section cannot import the configuration that it is a part of


def check_rules(config: Any) -> None:
    """Raises ConfigError by the first rule of a section of ``config`` that applies to it."""
    for field in dataclasses.fields(config):
        for rule in getattr(getattr(config, field.name), "flag_rules", ()):
            rule.check(config)


def check_own_rules(section: Any) -> None:
    """Raises ConfigError by the first of the section's own rules that applies to it."""
    for rule in section.own_flag_rules:
        rule.check(section)


def rules_of(sections: dict[str, type]) -> Iterator[tuple[str, Rule[Any]]]:
    """Every rule of ``sections``, by their names: a section's own ones first."""
    for name, section in sections.items():
        for rule in (*getattr(section, "own_flag_rules", ()), *getattr(section, "flag_rules", ())):
            yield name, rule


def at_least(section: Any, bound: int, *names: str) -> None:
    """Raises ConfigError where one of these fields is less than ``bound``; None is not."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"--{name.replace('_', '-')} must be {bound} or more, not {value}.")


def json_object(name: str, text: str) -> dict[str, Any]:
    """Reads the JSON object that is a flag's value; raises ConfigError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be a JSON object: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, not {text}.")
    return value
