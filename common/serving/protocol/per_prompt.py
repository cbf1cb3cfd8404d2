"""Fields that hold one value for all prompts of a batch, or a list with one for each."""

from __future__ import annotations

from typing import Any, TypeVar

from ...api.errors import InvalidRequest

T = TypeVar("T")


def per_prompt(name: str, value: T | list[T], count: int) -> list[T]:
    """``value`` for each of ``count`` prompts; raises InvalidRequest for a list of another length."""
    values = value if isinstance(value, list) else [value] * count
    check_count(name, values, count)
    return values


def check_count(name: str, values: list[Any], count: int) -> None:
    if len(values) != count:
        raise InvalidRequest(f"{name} holds {len(values)} entries for {count} prompts.", param=name)
