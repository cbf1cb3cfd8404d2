"""A workload: conversations, their prompts and arrival times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dataset_args import DatasetArgs
    from .vocabulary import Vocabulary


@dataclass(frozen=True)
class Prompt:
    """``text`` or ``ids``, as it is to be sent; ``num_tokens`` without what the server adds (BOS, a chat template)."""

    num_tokens: int
    text: str | None = None
    ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.ids is None)


@dataclass(frozen=True)
class Turn:
    """A user's message, answered with ``output_len`` tokens."""

    prompt: Prompt
    output_len: int


@dataclass(frozen=True)
class Conversation:
    """Turns. Each is sent with all earlier turns and their answers, once the previous one is answered.

    ``at``: seconds after the run's beginning at which the first turn is due, where the data set says so.
    """

    turns: tuple[Turn, ...]
    at: float | None = None


def single(prompt: Prompt, output_len: int, at: float | None = None) -> Conversation:
    return Conversation((Turn(prompt, output_len),), at)


def num_requests(conversations: Sequence[Conversation]) -> int:
    return sum(len(conversation.turns) for conversation in conversations)


DatasetFactory = Callable[["DatasetArgs", "Vocabulary", random.Random], list[Conversation]]
"""A registered data set: makes the conversations that the flags ask for. Raises ConfigError where a file cannot be
used."""
