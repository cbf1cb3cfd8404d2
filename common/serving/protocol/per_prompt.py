"""Fields with one value for all prompts of a batch, or a list with one for each prompt or choice."""

from __future__ import annotations

from typing import Any, TypeVar

from ...api.errors import InvalidRequest

T = TypeVar("T")


def per_prompt(name: str, value: T | list[T], count: int) -> list[T]:
    """``value`` for each of ``count`` prompts; raises InvalidRequest for a list of another length."""
    values = value if isinstance(value, list) else [value] * count
    check_count(name, values, count)
    return values


def per_choice(name: str, value: T | list[T], num_prompts: int, n: int) -> list[T]:
    """A value for each of ``n`` choices of each prompt; a list holds one per prompt, or one per choice."""
    if isinstance(value, list) and len(value) == num_prompts * n:
        return value
    return [item for item in per_prompt(name, value, num_prompts) for _ in range(n)]


def rooms_per_choice(name: str, value: int | list[int], num_prompts: int, n: int) -> list[int]:
    """The bootstrap room of each choice: consecutive from the one that is given for all choices, or for a prompt's."""
    if isinstance(value, int):
        return [value + i for i in range(num_prompts * n)]
    if len(value) == num_prompts * n:
        return value
    firsts: list[int] = per_prompt(name, value, num_prompts)
    return [first + i for first in firsts for i in range(n)]


def check_count(name: str, values: list[Any], count: int) -> None:
    """Raises InvalidRequest for a list that has not one entry per prompt."""
    if len(values) != count:
        raise InvalidRequest(f"{name} holds {len(values)} entries for {count} prompts.", param=name)
