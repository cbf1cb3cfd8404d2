"""Ranges of numeric flags; each raises ConfigError with the flag's name."""

from __future__ import annotations

from typing import Any

from ...common.api.errors import ConfigError


def positive(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) <= 0:
            raise ConfigError(f"{_flag(name)} must be more than 0.")


def at_least_one(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError(f"{_flag(name)} must be at least 1.")


def not_negative(args: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(args, name)) is not None and value < 0:
            raise ConfigError(f"{_flag(name)} must not be negative.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
