"""What answers of OpenAI's APIs say of the weights that sampled them, where SGLang's do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType


class Versioned(Protocol):
    """A choice, as far as its weights go."""

    weight_versions: list[tuple[str, int]]

    @property
    def weight_version(self) -> str: ...


class AnswerMetadata(msgspec.Struct):
    """``weight_version`` sampled the last token of the first choice. ``weight_versions``, where the weights changed
    while a choice ran: each choice's versions, with the number of tokens that each sampled."""

    weight_version: str
    weight_versions: list[list[tuple[str, int]]] | UnsetType = UNSET

    @classmethod
    def of(cls, choices: Iterable[Versioned]) -> AnswerMetadata:
        choices = list(choices)
        mixed = any(len(choice.weight_versions) > 1 for choice in choices)
        return cls(choices[0].weight_version, [choice.weight_versions for choice in choices] if mixed else UNSET)
