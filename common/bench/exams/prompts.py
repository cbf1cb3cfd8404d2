"""Prompts of questions, and the tokens whose probability decides between choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from ..workloads.vocabulary import Tokenizer
from .exam import Asked


@dataclass(frozen=True)
class ScoredChoice:
    """A prompt with a choice at its end: tokens from ``start`` on are the choice's."""

    ids: Sequence[int]
    start: int
    num_bytes: int
    """Bytes of the choice's text, by which its log-probability is divided: long choices are less likely."""


def plain_prompt(asked: Asked) -> str:
    """The examples, each with its answer, and the question."""
    shots = [shot.asked + shot.answered for shot in asked.shots]
    return "\n\n".join([*([asked.question.heading] if asked.question.heading else []), *shots, asked.question.asked])


def chat_prompt(asked: Asked, tokenizer: Tokenizer) -> str:
    """The same as a chat by the tokenizer's template, each example a turn. Raises InvalidRequest without a
    template."""
    heading = asked.question.heading
    messages = [{"role": "system", "content": heading}] if heading else []
    for shot in asked.shots:
        messages += [{"role": "user", "content": shot.message or shot.asked},
                     {"role": "assistant", "content": shot.answered.strip()}]
    messages.append({"role": "user", "content": asked.question.message or asked.question.asked})
    return tokenizer.render_chat(messages, tools=None, continue_final_message=False, options={})


def scored_choices(prompt: str, choices: Sequence[str], tokenizer: Tokenizer, *, chat: bool) -> list[ScoredChoice]:
    """Each choice after the prompt. All are scored from the first token that any of them changes: the tokenizer may
    join a choice's beginning with the prompt's end."""
    shown = [choice.strip() if chat else choice for choice in choices]
    before = tokenizer.encode(prompt, add_special_tokens=not chat)
    wholes = [tokenizer.encode(prompt + choice, add_special_tokens=not chat) for choice in shown]
    start = min(_shared(before, whole) for whole in wholes)
    return [ScoredChoice(whole, start, len(choice.encode())) for whole, choice in zip(wholes, shown)]


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))
